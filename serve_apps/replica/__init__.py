"""One replica of an app: an engine with all its ranks, and what it says to gateways and the controller."""
