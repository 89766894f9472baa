"""What an app is deployed with: plain data that the replicas, the gateway and the status page share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config.sections.serve import ServeAppConfig
from cluster.errors import RequestError
from cluster.state.nodes import ACCELERATOR_LABEL

DEPLOYMENT = "replica"
"""The Serve deployment inside every app's application."""
GATEWAY = "gateway"
"""The Serve application (and deployment) of the head's gateway; no app can have this name. Those of other
nodes are called `gateway:NODE_ID`."""
CONTROLLER = "shoal-apps"
"""Name of the actor that is the apps' controller, for those who call it from other processes."""
FRONT = "shoal-front"
"""The same of what stands in front of the gateways."""
SERVE_NAMESPACE = "serve"
"""Ray's namespace of Serve's actors."""


def gateway_of(node_id: str) -> str:
    """The Serve application of the gateway of a node that is not the head."""
    return f"{GATEWAY}:{node_id}"


def node_of(gateway: str) -> str:
    """The id of the node that such a Serve application is the gateway of."""
    return gateway.partition(":")[2]


def is_gateway(application: str) -> bool:
    """Whether a Serve application is a gateway."""
    return application.partition(":")[0] == GATEWAY


@dataclass(frozen=True)
class AppSpec:
    """One version of one app. Everything is JSON-able, see `as_json` and `from_json`."""

    name: str
    """The app's name: `model` in OpenAI requests."""
    config: ServeAppConfig
    model_path: str
    """Directory that every node can read; empty when the model is fetched from `storage`."""
    model_version: str
    """`name@version` of the registry, or the directory's own name."""
    storage: str | None = None
    """Storage that is not local, whose registry each replica fetches `model_version` from."""
    engine: str = ""
    """What runs the model: a name of the engine table, or `module:Class`. Default: the config's."""

    def __post_init__(self) -> None:
        if self.name == GATEWAY:
            raise RequestError(
                f"serve_apps.{self.name}: '{GATEWAY}' is the gateway's own name; choose another"
            )
        if self.config.cpus == 0 and self.config.gpus == 0:
            raise RequestError(
                f"serve_apps.{self.name}: a rank takes cpus: 0 and gpus: 0; give it at least one"
            )
        if not self.engine:
            object.__setattr__(self, "engine", self.config.engine)

    @property
    def holder(self) -> str:
        """The holder of the app's lease."""
        return f"app/{self.name}"

    @property
    def rank_resources(self) -> dict[str, float]:
        """What one rank takes, in Ray's names; what is not taken is left out."""
        return {name: float(n) for name, n in (("CPU", self.config.cpus), ("GPU", self.config.gpus)) if n}

    @property
    def replica_resources(self) -> dict[str, float]:
        """What one replica takes, all its ranks together."""
        return {name: n * self.config.ranks for name, n in self.rank_resources.items()}

    @property
    def standing(self) -> dict[str, Any]:
        """What its demands say beside numbers of replicas: fields of `Demand`."""
        config = self.config
        return {
            "unit": self.replica_resources,
            "priority": config.priority,
            "weight": config.weight,
            "accelerator": config.accelerator,
        }

    def bundle_labels(self, num_bundles: int) -> list[dict[str, str]] | None:
        """The labels of the nodes where a placement group of it may be; None for any."""
        if self.config.accelerator is None:
            return None
        return [{ACCELERATOR_LABEL: self.config.accelerator}] * num_bundles

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.model_dump(mode="json")}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> AppSpec:
        config = ServeAppConfig.model_validate_json(json.dumps(document["config"]))
        return cls(**{**document, "config": config})
