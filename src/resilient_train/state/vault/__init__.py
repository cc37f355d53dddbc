"""Memory snapshots that outlive their processes: two slots per rank in a sealed memfd, owned by the node's holder.

``record`` says what a slot's record is, ``slots`` writes and reads a pair of them, ``room`` asks whether memory will
do,
``client`` is how a rank or an agent talks to the holder (``state/vault/holder.py``), in the words of ``frames``.
"""
