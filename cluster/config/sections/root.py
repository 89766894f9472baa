"""The whole config file as one object, read by both tenants."""

from __future__ import annotations

from pydantic import Field

from cluster.config.sections.cluster import ClusterConfig
from cluster.config.sections.section import Name, Section
from cluster.config.sections.serve import ServeAppConfig
from cluster.config.sections.train import TrainJobConfig


class ShoalConfig(Section):
    """One cluster, its training jobs and its serving apps."""

    cluster: ClusterConfig = ClusterConfig()
    train_jobs: dict[Name, TrainJobConfig] = Field(default_factory=dict)
    """Training jobs by name."""
    serve_apps: dict[Name, ServeAppConfig] = Field(default_factory=dict)
    """Serving apps by name."""
