"""What nobody could put back, looked for in the user's program: it is refused, or told, before a fault makes it
wrong.
"""
