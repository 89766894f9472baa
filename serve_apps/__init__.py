"""The serving tenant: apps that run through Ray Serve under a lease."""
