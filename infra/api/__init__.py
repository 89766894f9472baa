"""The control API: one HTTP service on the head, what one may do there, and its client."""
