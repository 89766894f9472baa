"""What is known of a cluster that is up, and joining it."""
