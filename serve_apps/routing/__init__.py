"""How requests are spread over the replicas of an app."""

ROUTERS = {"least_connections": "serve_apps.routing.serve_router:LeastConnectionsRouter"}
"""The config's `routing` → the Ray Serve request router that carries it out."""
