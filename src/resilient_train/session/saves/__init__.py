"""What outlives a rank: what it publishes of its own state, snapshots and checkpoints, when they are due, and the way
back from them.
"""
