"""The controller's name, for those who call it from other processes."""

CONTROLLER = "shoal-apps"
"""Name of the actor."""
NAMESPACE = "shoal"
