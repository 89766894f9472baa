"""One trace and one load under several policies: what is compared, and what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.errors import RequestError
from infra.lab.simulator.costs import Costs
from infra.lab.simulator.daily_load import apps_for
from infra.lab.simulator.generator import Recipe
from infra.lab.simulator.jobs import Trace
from infra.lab.simulator.occupancy import cluster_of
from infra.lab.simulator.outcome import Figures, figures
from infra.lab.simulator.policies import NAMES, policy_of
from infra.lab.simulator.simulation import Rules, Simulation


@dataclass(frozen=True)
class Setup:
    """The cluster, its serving load, and how it is shared.

    Attributes:
        kinds: (kind of accelerator, devices) of the cluster; the kind may be None.
        serving_share: part of the devices that serving's peak needs, and that is its own in a fixed split.
        tensor: devices of a replica.
        reserve: part of the devices that the minimums of jobs leave to serving (see `policies.Shoal`).

    Raises:
        RequestError: the apps do not fit into serving's share.
    """

    kinds: Sequence[tuple[str | None, int]] = ((None, 64),)
    node_devices: int = 8
    serving_share: float = 0.5
    apps: int = 2
    tensor: int = 2
    reserve: float = 0.0
    policies: Sequence[str] = NAMES
    costs: Costs = field(default_factory=Costs)
    rules: Rules = field(default_factory=Rules)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.serving and self.serving < self.apps * self.tensor:
            raise RequestError(
                f"serving's share of {self.devices} devices, {self.serving} of them, is too few for"
                f" {self.apps} apps with replicas of {self.tensor}"
            )
        if self.serving and self.tensor > self.node_devices:
            raise RequestError(
                f"a replica of {self.tensor} devices is on one node, and a node has {self.node_devices}"
            )

    @property
    def devices(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def serving(self) -> int:
        """Devices that serving's peak needs."""
        return round(self.devices * self.serving_share)

    def recipe(self, days: float, load: float, elastic: float) -> Recipe:
        """What is generated for this cluster."""
        return Recipe(
            self.seed,
            days,
            load,
            self.devices - self.serving,
            cluster=self.devices,
            elastic=elastic,
            node_devices=self.node_devices,
        )

    def facts(self, trace: Trace) -> dict[str, Any]:
        """What was assumed, for the result."""
        return {
            "trace": trace.source,
            "jobs": len(trace.jobs),
            "left_out": list(trace.left_out),
            "span_s": trace.span_s,
            "device_seconds": trace.device_seconds,
            "devices": self.devices,
            "node_devices": self.node_devices,
            "serving_devices": self.serving,
            "apps": self.apps if self.serving else 0,
            "tensor": self.tensor,
            "reserve": self.reserve,
            "seed": self.seed,
            "costs": self.costs.as_json(),
            "costs_from": self.costs.sources(),
            "rules": asdict(self.rules),
        }


def compare(trace: Trace, setup: Setup, tell: Callable[[str], None] = lambda _: None) -> list[Figures]:
    """The figures of each policy, in the order of `setup.policies`.

    Args:
        tell: is told how long each took.

    Raises:
        RequestError: a job can never run, or there is no room for the apps; nothing was simulated then.
    """
    nodes = cluster_of(setup.kinds, setup.node_devices)
    apps = apps_for(setup.serving, setup.apps, setup.tensor) if setup.serving else []
    reserve = round(setup.devices * setup.reserve)
    simulations = []
    for name in setup.policies:
        policy = policy_of(name, nodes, setup.serving, reserve)
        simulations.append(Simulation(trace, apps, nodes, policy, setup.costs, setup.rules, setup.seed))
    rows = []
    for simulation in simulations:
        began = time.process_time()
        rows.append(figures(simulation.run()))
        took_s = time.process_time() - began
        tell(f"{rows[-1].policy}: {rows[-1].decisions:,} decisions in {took_s:.1f} s of CPU time")
    return rows
