"""What a window's bodies find again when they run a second time: batches, calls and what those were given, random
numbers.
"""
