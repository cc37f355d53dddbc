"""The launcher: ``run`` is ``resilient-run``, ``agent`` keeps a node's ranks alive, ``cli`` is ``resilient-train``."""
