"""How requests are spread over the replicas of an app."""

ROUTER = "serve_apps.routing.serve_router:PolicyRouter"
"""The Ray Serve request router that carries a policy out."""

POLICIES = {
    "round_robin": "serve_apps.routing.policy:RoundRobin",
    "least_connections": "serve_apps.routing.policy:LeastConnections",
    "weighted": "serve_apps.routing.weighted:Weighted",
    "response_time": "serve_apps.routing.response_time:ResponseTime",
    "prefix": "serve_apps.routing.prefix:Prefix",
}
"""The config's `routing` → the policy's class."""
