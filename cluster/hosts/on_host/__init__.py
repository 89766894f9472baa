"""What a host that Shoal starts Ray on does for its own node, whoever asked for it."""
