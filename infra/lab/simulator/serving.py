"""A serving app while it is simulated: its load, its replicas, and the requests that met too few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.sharing.demand import Demand
from infra.lab.simulator.daily_load import SimulatedApp
from infra.lab.simulator.occupancy import DEVICE
from infra.lab.simulator.training import Spent
from serve_apps.controller.wants import Load, Wants, asked


@dataclass(eq=False)
class SimulatedReplica:
    """One replica: its node, and whether it starts, serves or drains."""

    node: str
    ready: bool = False
    drains: bool = False


@dataclass(eq=False)
class AppRun:
    """One app from the first second to the last.

    How many replicas it wants is decided by the product's own arithmetic (`serve_apps.controller.wants`)
    from the requests in flight.

    Attributes:
        requests: that came.
        missed: of those, the ones beyond what the ready replicas answer within the service level. A request
            that was missed is gone: it does not wait and adds to nobody's load.
        short_s: seconds during which requests were missed.
    """

    app: SimulatedApp
    replicas: list[SimulatedReplica] = field(default_factory=list)
    rate: float = 0.0
    requests: float = 0.0
    missed: float = 0.0
    short_s: float = 0.0
    spent: Spent = field(default_factory=Spent)
    wants: Wants = field(default_factory=Wants)
    _synced_at: float = 0.0
    _demand: Demand | None = None

    def __post_init__(self) -> None:
        self.wants.want = self.app.fewest

    @property
    def ready(self) -> int:
        return sum(replica.ready for replica in self.replicas)

    def sync(self, now: float) -> None:
        """Bring requests and device-seconds up to this moment."""
        passed = now - self._synced_at
        if passed <= 0:
            return
        ready, devices = self.ready, self.app.tensor * passed
        draining = sum(replica.drains for replica in self.replicas)
        self.spent.serving += ready * devices
        self.spent.leaving += draining * devices
        self.spent.starting += (len(self.replicas) - ready - draining) * devices
        missed = self.rate - ready * self.app.replica_rate
        self.requests += self.rate * passed
        if missed > 0:
            self.missed += missed * passed
            self.short_s += passed
        self._synced_at = now

    def look(self, now: float) -> bool:
        """Let the autoscaler look at the load; whether it wants another number of replicas now."""
        app, before = self.app, self.wants.want
        ask = asked(Load(ongoing=app.ongoing(self.rate), replicas=self.ready), app.autoscale)
        self.wants.update(ask, app.fewest, app.most, app.autoscale, now)
        if self.wants.want != before:
            self._demand = None
        return self.wants.want != before

    def demand(self) -> Demand:
        """What it asks for now: its fewest replicas at least, as many as it wants at most."""
        if self._demand is None:
            self.replicas.sort(key=lambda replica: (replica.drains, not replica.ready))
            app = self.app
            held = tuple(replica.node for replica in self.replicas)
            unit = {DEVICE: float(app.tensor)}
            self._demand = Demand(app.name, "serving", unit, app.fewest, self.wants.want, held)
        return self._demand

    def promised(self) -> range:
        """Of the replicas that its demand holds, those that do not serve: they start up or drain."""
        return range(self.ready, len(self.demand().held))

    def changes(self, places: Sequence[str]) -> tuple[list[SimulatedReplica], list[str]]:
        """The replicas that a grant of these places leaves out, and the places of those that it adds."""
        wanted = Counter(places)
        leaving = []
        for replica in self.replicas:
            if wanted[replica.node] > 0:
                wanted[replica.node] -= 1
            elif not replica.drains:
                leaving.append(replica)
        return leaving, list(wanted.elements())

    def start(self, node: str) -> SimulatedReplica:
        """A replica is granted and starts up."""
        replica = SimulatedReplica(node)
        self.replicas.append(replica)
        self._demand = None
        return replica

    def serve(self, replica: SimulatedReplica) -> None:
        """A replica is ready."""
        replica.ready = True
        self._demand = None

    def drain(self, replicas: Iterable[SimulatedReplica]) -> None:
        """Replicas get no further request."""
        for replica in replicas:
            replica.ready, replica.drains = False, True
        self._demand = None

    def drop(self, replica: SimulatedReplica) -> None:
        """A replica is gone."""
        self.replicas.remove(replica)
        self._demand = None
