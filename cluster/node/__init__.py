"""What stands on every node, for whoever needs it there."""
