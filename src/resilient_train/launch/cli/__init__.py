"""The commands: ``run`` is ``resilient-run``, ``tool`` is ``resilient-train``; the others are what that does."""
