"""The training tenant: jobs that run through Ray Train under a lease."""
