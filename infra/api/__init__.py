"""The control API: one HTTP service on the head, what one may do there, and its client."""

API_VERSION = 1
"""Of the paths and documents; within one of it they only gain."""
PREFIX = f"/api/v{API_VERSION}"
"""Of every path."""
