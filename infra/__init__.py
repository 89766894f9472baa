"""The front door: the command line and what operators need around the cluster."""
