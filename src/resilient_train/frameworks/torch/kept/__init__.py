"""What a window of steps keeps of a script's objects, so that a redo finds them as its first run has, and a replica can
hand them on: parameters, buffers, switches and values of modules, optimizers, random numbers, batches.
"""
