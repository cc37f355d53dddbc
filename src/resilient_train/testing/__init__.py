"""Tools for testing: ``sim`` is a whole cluster in one thread with virtual time, driving the production protocol."""
