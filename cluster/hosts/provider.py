"""What every provider of nodes can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import RequestError
from cluster.state.record import ClusterRecord

Tell = Callable[[str], None]
"""Takes a sentence about what is happening, for the person who waits."""


Beside = Callable[[ClusterRecord], Callable[[], None]]
"""Begins something else on a cluster that this process has just joined; what it returns waits for that."""


def nothing_beside(record: ClusterRecord) -> Callable[[], None]:
    """A `Beside` of those who want nothing else."""
    return lambda: None


@dataclass(frozen=True)
class Started:
    """The outcome of `up`."""

    record: ClusterRecord
    was_up: bool
    """Nothing was started: the cluster was up already."""


@dataclass(frozen=True)
class RemoteStarted:
    """The outcome of `up` where the nodes are elsewhere.

    Attributes:
        record: None where the nodes were ended again.
        document: what the command has printed that was run on the head.
    """

    record: ClusterRecord | None
    was_up: bool
    document: dict[str, Any]


def waiting_for(name: str) -> str:
    """What is told while another command holds the lock of a cluster."""
    return f"another command is starting or stopping cluster {name}; waiting for it"


def require_same_file(name: str, theirs: str, config_path: Path) -> None:
    """See that a cluster that is up was started from the file that is to bring it up.

    Raises:
        RequestError: it was another one.
    """
    if theirs != str(config_path):
        raise RequestError(
            f"cluster {name} is up already, from {theirs}: give this one another cluster.name, or take that"
            " one down first (`shoal down`)"
        )


def require_own_file(name: str, theirs: str, config_path: Path | None) -> None:
    """See that a cluster is taken down from the file that it was started from, if that is still there.

    Raises:
        RequestError: it is another one.
    """
    other = Path(theirs)
    if config_path is not None and other != config_path.absolute() and other.exists():
        raise RequestError(
            f"cluster {name} was started from {other}, not from {config_path}: `shoal down -f {other}` takes"
            " it down"
        )


class RemoteProvider(Protocol):
    """Starts and stops nodes that this machine is none of: all that is done as one of them, a command of
    `shoal` does on the head, with a config of its own (`provider: existing`). Safe to call from several
    processes at once."""

    def up(
        self,
        cluster: ClusterConfig,
        config_path: Path,
        tell: Tell,
        command: Sequence[str],
        *,
        stay: bool = True,
    ) -> RemoteStarted:
        """Start the nodes that do not run, and run a command of `shoal` on the head; whole or not at all,
        where none ran.

        Args:
            cluster: its section of the config, paths resolved.
            config_path: the file that is from.
            command: prints one JSON document, and leaves a cluster of this name up.
            stay: otherwise it leaves none, and the nodes are ended again.

        Raises:
            ShoalError: a host is not reached, does not fit, or its node does not start; the command failed.
            RequestError: another file has a cluster of this name.
        """

    def down(self, name: str, tell: Tell, command: Sequence[str], config_path: Path | None = None) -> bool:
        """Run a command of `shoal` on the head, which ends what runs there, and end every node; False when
        there was nothing. A host that does not answer is told, and forgotten.

        Raises:
            RequestError: as `Provider.down`.
        """


class Provider(Protocol):
    """Starts and stops nodes of which this machine is one. Safe to call from several processes at once.

    Attributes:
        owns_nodes: its nodes end with `down`, and with them whatever runs there; where not, the jobs and apps
            are ended before.
    """

    owns_nodes: bool

    def up(
        self, cluster: ClusterConfig, config_path: Path, tell: Tell, beside: Beside = nothing_beside
    ) -> Started:
        """Start the cluster, or find it up; whole or not at all. This process may be a driver of it then.

        Args:
            cluster: its section of the config, paths resolved.
            config_path: the file that is from.
            beside: what starts with its services, where they are started.

        Raises:
            RequestError: the config asks for what this machine or another cluster does not leave.
            ShoalError: a node did not start; everything was taken down again.
        """

    def down(self, name: str, tell: Tell, config_path: Path | None = None) -> bool:
        """Stop every process of the cluster and remove its state; False when there was nothing.

        Args:
            config_path: the file the caller has the name from.

        Raises:
            RequestError: the cluster was started from another file, which is still there: two files that
                chose one name should not end each other's clusters.
        """

    def silent(self, record: ClusterRecord) -> list[str]:
        """The names of its nodes that do not answer; the head's is among them when its GCS does not."""
