"""HTTP below the API: connections, bodies, streams, deadlines, and an account of each request."""
