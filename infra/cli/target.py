"""Which cluster a command is about, and what answers there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from cluster.errors import ConfigError, ShoalError
from infra.api.client import ApiClient, Endpoint

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.state.record import ClusterRecord
    from infra.api.contexts import Context

CONTEXT_VARIABLE = "SHOAL_CONTEXT"
DEFAULT_NAME = "shoal"
"""Of a cluster that the config does not name."""


@dataclass(frozen=True)
class Target:
    """A cluster, as it is reached from here.

    Attributes:
        name: of the cluster.
        record: what is known of it where it was brought up from here; None of one behind a context.
    """

    name: str
    endpoint: Endpoint
    record: ClusterRecord | None = None

    @property
    def is_here(self) -> bool:
        """Whether this machine is one of its nodes, which see the files that are seen here."""
        return self.record is not None and self.record.is_here

    @cached_property
    def api(self) -> ApiClient:
        """Asks it."""
        record = self.record
        if record is None or not record.is_here:
            return ApiClient(self.endpoint)
        return ApiClient(self.endpoint, hopeless=partial(_why_silent, record))


def find_target(file: str | None = None, settings: Sequence[str] | None = None) -> Target:
    """The cluster that a command is about: that of --context or $SHOAL_CONTEXT; else the one that the config
    names, where it is up from here; else that of the current context.

    Raises:
        ConfigError: there is no config, and no context; or it cannot be read.
        ShoalError: the cluster is not up.
    """
    target = target_if_up(file, settings)
    if target is None:
        from cluster.state.connection import require_record

        name = cluster_name(file, settings)
        _require_no_waiting(name)
        require_record(name)
        raise ShoalError("the cluster went down a moment ago")
    return target


def target_if_up(file: str | None = None, settings: Sequence[str] | None = None) -> Target | None:
    """The same; None where the cluster is not up, as far as that is known here."""
    from cluster.state.record import read_record
    from infra.api.contexts import read_contexts

    record = None
    if not os.environ.get(CONTEXT_VARIABLE):
        try:
            record = read_record(cluster_name(file, settings))
        except ConfigError:
            if file is not None or read_contexts().current is None:
                raise  # whoever has a context needs no config
    context = _context() if record is None else None
    if context is not None:
        return Target(context.cluster, context.endpoint())
    return None if record is None else target_of(record)


def chosen_context(path: Path) -> Context | None:
    """The context that counts for a config, if any does: its cluster is not up from here."""
    from cluster.state.record import read_record

    context = _context()
    if context is None or os.environ.get(CONTEXT_VARIABLE):
        return context
    return context if read_record(cluster_name(str(path))) is None else None


def _context() -> Context | None:
    from infra.api.contexts import read_contexts

    contexts = read_contexts()
    chosen = os.environ.get(CONTEXT_VARIABLE) or contexts.current
    return None if chosen is None else contexts.get(chosen)


def target_of(record: ClusterRecord) -> Target:
    """The cluster that was brought up from here.

    Raises:
        ShoalError: it has no control API, or the way there does not open.
    """
    from infra.api.access import own_token

    if not record.api_port:
        raise ShoalError(
            f"cluster {record.name} was brought up by an older version of Shoal, which had no control API:"
            " `shoal down` and `shoal up` give it one"
        )
    token = own_token(record)
    if record.provider == "ssh":
        from cluster.hosts.ssh.fleet import require_fleet

        fleet = require_fleet(record.name)
        endpoint = Endpoint(
            record.api_url, token, own=True, socket=str(fleet.open_way()), renamed=fleet.renamed()
        )
        return Target(record.name, endpoint, record)
    if record.provider == "kubernetes":
        from cluster.hosts.kubernetes.port_forward import read_cluster

        way = read_cluster(record.name)
        if way is not None:
            way.open_way()
    endpoint = Endpoint(record.api_url, token, record.api_certificate, own=True)
    return Target(record.name, endpoint, record)


def _require_no_waiting(name: str) -> None:
    """See that a cluster that is not up is not about to come up.

    Raises:
        ShoalError: its batch job waits, or starts; the message says so.
    """
    from cluster.hosts.slurm.following import how_it_stands

    standing = how_it_stands(name)
    if standing is not None:
        raise ShoalError(f"cluster {name} is not up: {standing}")


def _why_silent(record: ClusterRecord) -> str | None:
    """Why a cluster that was brought up from here does not answer, where that is no matter of seconds."""
    from cluster.state.connection import head_is_silent

    missing = head_is_silent(record)
    if missing is None:
        return None
    return f"cluster {record.name} is not up: {missing} does not answer: run `shoal up`"


def cluster_name(file: str | None, settings: Sequence[str] | None = None) -> str:
    """The name of the cluster that the config is for; nothing else of it is looked at where that can be.

    Raises:
        ConfigError: there is no config, or it cannot be read.
    """
    from cluster.config.find import find_config, read_config

    path = find_config(file)
    if not settings:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        text = read_config(path, str(path))
        try:
            document = YAML(typ="safe", pure=True).load(text)
            section = document.get("cluster") or {}
            name = section.get("name", DEFAULT_NAME)
            if isinstance(name, str) and name:
                return name
        except (YAMLError, AttributeError, ValueError, RecursionError):
            pass  # the loader says what is wrong
    from cluster.config.loader import load_config

    return load_config(path, settings or (), across=False).config.cluster.name
