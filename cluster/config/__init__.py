"""The one config file: its sections as frozen models, and how it is read."""

from cluster.config.cluster_section import ClusterConfig, EndpointConfig, NodeConfig, SharingConfig
from cluster.config.root import ShoalConfig
from cluster.config.serve_section import ServeAppConfig
from cluster.config.train_section import TrainJobConfig

__all__ = [
    "ClusterConfig",
    "EndpointConfig",
    "NodeConfig",
    "ServeAppConfig",
    "SharingConfig",
    "ShoalConfig",
    "TrainJobConfig",
]
