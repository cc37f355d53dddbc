"""Ranks are born as forks: one process has done the imports, and every rank of the node is a fork of it."""
