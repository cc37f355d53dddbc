"""The torch engine. ``register()`` makes ``dist.init_process_group("resilient")`` known; see ``group.py``."""
