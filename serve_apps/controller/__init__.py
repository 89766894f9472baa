"""The controller of the apps: how many replicas of which version run, and which of them get requests."""
