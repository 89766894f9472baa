"""Actors that others find by their names."""

NAMESPACE = "shoal"
"""Ray's namespace of everything that is Shoal's."""
