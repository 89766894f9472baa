"""The one config file: its sections as frozen models, and how it is read."""

from cluster.config.sections.cluster import ClusterConfig, EndpointConfig, NodeConfig, SharingConfig
from cluster.config.sections.root import ShoalConfig
from cluster.config.sections.serve import ServeAppConfig
from cluster.config.sections.train import TrainJobConfig

__all__ = [
    "ClusterConfig",
    "EndpointConfig",
    "NodeConfig",
    "ServeAppConfig",
    "SharingConfig",
    "ShoalConfig",
    "TrainJobConfig",
]
