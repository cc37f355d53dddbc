"""Whether the numbers are right: replicas with each other, a window computed twice, norms, losses and NaN."""
