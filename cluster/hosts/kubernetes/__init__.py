"""A cluster in pods, through KubeRay's RayCluster."""
