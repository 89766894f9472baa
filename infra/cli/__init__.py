"""The `shoal` command, one file a noun."""
