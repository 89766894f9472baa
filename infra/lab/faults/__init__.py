"""Faults that are done to clusters and jobs for real, and the scenarios that use them."""
