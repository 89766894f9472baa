"""The paths of the control API, one file a noun."""
