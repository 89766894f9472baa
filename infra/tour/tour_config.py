"""The config of the tour: the one that `shoal init` writes, changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JOB = "stdlib-lm"
ELASTIC_JOB = "elastic-lm"
APP = "chat"


def adapt(text: str, cluster_name: str, cluster: Mapping[str, Any] | None = None) -> str:
    """The config that `shoal init` writes, changed for the tour; comments stay.

    Two workers' nodes, one for a replica and one for the second one under load; short training with more
    checkpoints than usual, so that little is lost. An elastic job takes two of the second node's three CPUs,
    of which the second replica needs one.

    Args:
        cluster: the section `cluster` of another file, which the tour is to run on; its paths are absolute.
    """
    import io

    from ruamel.yaml import YAML

    yaml = YAML()
    document = yaml.load(text)
    if cluster is not None:
        sharing = {**document["cluster"]["sharing"], **cluster.get("sharing", {})}
        document["cluster"] = {**cluster, "sharing": sharing}
    else:
        document["cluster"]["nodes"][1:] = [{"name": "worker-1", "cpus": 2}, {"name": "worker-2", "cpus": 3}]
    document["cluster"]["name"] = cluster_name
    document["cluster"]["sharing"]["settle_s"] = 1
    job = document["train_jobs"][JOB]
    job["steps"] = 80
    job["checkpoint"]["every_steps"] = 20
    job["evaluate"]["every_steps"] = 40
    job["data"]["held_out_every"] = 50
    app = document["serve_apps"][APP]
    app["replicas"] = {"min": 1, "max": 2}
    app["autoscale"]["target_ongoing_requests"] = 6
    app["autoscale"]["downscale_delay_s"] = 3
    document["train_jobs"][ELASTIC_JOB] = {
        "model": {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 2048},
        "data": {"source": "python-stdlib", "sequence_length": 64, "held_out_every": 50},
        "workers": {"min": 1, "max": 2},
        "batch": {"global": 8, "micro": 4},
        "steps": 1_000_000,
        "evaluate": {"every_steps": None},
        "checkpoint": {"every_steps": 1000},
    }
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def below(storage: str, name: str) -> str:
    """A place of its own in a storage, which may be seen only from elsewhere."""
    path, mark, query = storage.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def above(storage: str, name: str) -> str:
    """A storage, without that place of its own."""
    path, mark, query = storage.partition("?")
    return f"{path.rstrip('/').removesuffix(f'/{name}')}{mark}{query}"
