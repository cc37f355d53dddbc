"""What the text of the user's loop says, without running it."""
