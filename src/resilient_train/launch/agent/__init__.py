"""What looks after the ranks of a node, from their start to their end: ``agent`` is its heart."""
