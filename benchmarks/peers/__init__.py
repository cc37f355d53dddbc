"""The parts of ``peers.py`` and the jobs that it starts, one for each system that is compared."""
