"""Tensors as memory: where they lie, how they are found in trees of state, copied, digested, moved off a device, and
written as pieces of a checkpoint.
"""
