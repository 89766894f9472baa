"""The gateway: from an HTTP request of a client to replicas, and back."""
