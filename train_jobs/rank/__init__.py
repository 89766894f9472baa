"""What one rank does, in a process of its own; needs torch, and no Ray."""
