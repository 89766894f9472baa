"""Hosts that OpenSSH's client reaches, and on which Shoal starts Ray."""
