"""The protocol as pure state machines: no I/O, no threads, no clock, no torch.

``messages`` are the frames, ``controller`` decides for the job, ``rank`` for one rank, ``policy`` says when to
give up, ``replicas`` who holds what. ``docs/protocol.md`` tells the story with pictures.
"""
