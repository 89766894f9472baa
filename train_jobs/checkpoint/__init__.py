"""Checkpoints: what is saved, where, and when it counts."""
