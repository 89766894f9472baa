"""Measuring jobs side by side."""
