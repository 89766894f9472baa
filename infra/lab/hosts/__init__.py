"""Computers of their own on this machine: what passes only because all nodes share something fails here."""
