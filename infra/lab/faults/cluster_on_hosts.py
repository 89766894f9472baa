"""The cluster whose nodes are hosts, joined by cables; what befalls them, and how it is mended."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from infra.lab.bench.own_cluster import OwnCluster
from infra.lab.faults.waiting import wait_for
from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import Lan
from infra.lab.hosts.network import CabledNetwork, Way
from infra.lab.hosts.ray_site import RaySite

WORKERS = ("worker-0", "worker-1", "worker-2")


class ClusterOnHosts:
    """Up from the start to the end of a `with`: somebody's Ray on hosts, with Shoal on it.

    This machine is the head; each of WORKERS is a host, whose name is that of its node.

    Args:
        config: the sections of a `shoal.yaml`.
        shared: the directory of this machine that all hosts see in the same place.
        directory: of this machine, for disks and cables.
        say: takes each sentence about what happens.
    """

    cluster: OwnCluster

    def __init__(
        self, config: Mapping[str, Any], shared: Path, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._shared = shared
        self._directory = directory
        self._say = say
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            place = Path(ends.enter_context(tempfile.TemporaryDirectory(dir=self._directory)))
            files = Path(ends.enter_context(tempfile.TemporaryDirectory(dir=self._shared)))
            self._network = CabledNetwork(len(WORKERS), place)
            shared = {str(self._shared): self._shared}
            self._lan = ends.enter_context(Lan(WORKERS, place, shared=shared, wires=lambda _: self._network))
            self._ray = ends.enter_context(RaySite(self._lan, files))
            section = {**self._config["cluster"], "provider": "existing", "address": self._ray.address}
            config = {**self._config, "cluster": section}
            self.cluster = ends.enter_context(OwnCluster(config, self._say, files, self._ray.mark))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    # -- what befalls hosts and cables ------------------------------------------------------------------

    def cut_power(self, node: str) -> None:
        """End everything on a host at once, and tell nobody."""
        self._lan.host(node).cut_power()

    def cut(self, node: str, *ways: Way) -> None:
        """Let nothing through the cable of a host in these directions; both by default."""
        self._network.cut(WORKERS.index(node) + 1, *ways)

    def worsen(self, loss: float, delay_s: float) -> None:
        """Lose this share of all packets, and take so long for each, on every cable."""
        self._network.worsen(loss, delay_s)

    def mend(self) -> None:
        """Make all cables whole again."""
        self._network.mend()

    def boot(self, node: str) -> None:
        """Mend all cables and boot a host anew; waits until Ray has counted its node out."""
        host = self._lan.host(node)
        self.mend()
        host.halt()
        host.boot()
        wait_for(lambda: not _counted(host), f"Ray does not notice that {node} is gone")

    def start_node(self, node: str) -> None:
        """Start Ray on a host that has booted anew; waits for `ray start`."""
        self._ray.start_node(self._lan.host(node))

    def bring_back(self, node: str) -> None:
        """Boot a host anew and start Ray there; waits until Ray counts its node in."""
        self.boot(node)
        self.start_node(node)
        host = self._lan.host(node)
        wait_for(lambda: _counted(host), f"Ray does not notice that {node} is back")


def _counted(host: Host) -> bool:
    """Whether Ray has a node that is alive on this host."""
    import ray

    return any(row["Alive"] and row["NodeManagerAddress"] == host.address for row in ray.nodes())
