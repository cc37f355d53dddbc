"""Process groups that outlive their members, and the collectives in them: before the loop, in a body, behind the
update.

``process_group.py`` is one group; ``transports`` are the libraries that carry it.
"""
