"""Sharing measured on a cluster of its own, beside a fixed split under the same load."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.sharing.demand import Demand
from infra.lab.bench.arrivals import Arrivals
from infra.lab.bench.asking import Asker
from infra.lab.bench.clients import SteadyLoad
from infra.lab.bench.give_and_take import GiveAndTake, logs_of
from infra.lab.bench.job_watch import JobWatch
from infra.lab.bench.load_course import Round
from infra.lab.bench.own_cluster import OwnCluster, OwnJob
from infra.lab.bench.rays_own import APP, RaysOwn
from infra.lab.bench.sharing_plan import SEED, STEPS, SharingPlan
from infra.lab.bench.side import DEVICE, FIXED, RAY, SHARING, Side
from infra.lab.bench.training_rate import rate

LOW = 1
"""Clients that ask while the load is low."""
PROMPT = "import os\n\n\ndef "
THINK_S = 0.1
"""Between an answer and the client's next request."""
HOLD_S = 3.0
"""How long the load stays high when the new replica answers, and low when training has the device back."""
UNDISTURBED_S = 10.0
"""For how long the rate of training is measured without a load."""
WARM_UP_S = 2.0
PATIENCE_S = 300.0
"""How long devices may take to change hands."""
_RENEW_S = 1.0


def measure(plan: SharingPlan, say: Callable[[str], None]) -> dict[str, Side]:
    """All sides, by name: each gets the same load.

    Raises:
        ShoalError: devices did not change hands in time, or a job or an app could not be started.
    """
    with TemporaryDirectory(prefix="shoal-bench-") as directory:
        model = Path(directory, "model")
        with OwnCluster(plan.config(), say) as cluster:
            measurement = _Measurement(plan, cluster, say)
            shared = measurement.sharing()
            sides = {SHARING: shared, FIXED: measurement.fixed(shared)}
            shutil.copytree(measurement.model, model)
        if plan.load != STEPS:  # which end when devices have changed hands: Ray's do not
            sides[RAY] = _rays_own(plan, model, Path(directory), say)
        return sides


def _rays_own(plan: SharingPlan, model: Path, directory: Path, say: Callable[[str], None]) -> Side:
    """An elastic trainer and Serve, each asking Ray, on a cluster as before."""
    say("Ray's own way: an elastic trainer and Serve, each asking Ray")
    with OwnCluster(plan.config(), say) as cluster:
        rays = RaysOwn(plan, cluster, model, directory)
        with rays.running() as base_url:
            shape = plan.shape()
            load = Arrivals(Asker(base_url, APP, PROMPT, plan.answer_tokens), shape.due_times(SEED))
            time.sleep(WARM_UP_S)
            span = load.run(time.sleep)
            serving_s = rays.serving_s(*span)
            return Side(
                span, rays.logs(), {}, load.answers, load.failures, load.first_tokens, serving_s=serving_s
            )


class _Measurement:
    def __init__(self, plan: SharingPlan, cluster: OwnCluster, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._cluster = cluster
        self._say = say
        self.model = self._publish()

    def _publish(self) -> str:
        """Train the model that is served; returns its directory: its tokenizer serves others, too."""
        from cluster.models.registry import Registry

        self._say("training the model that is served")
        job = self._cluster.submit("served")
        (ended,) = job.until(lambda: job.events("finished"), "the model was not trained", PATIENCE_S)
        if ended["status"] != "succeeded":
            raise ShoalError(f"the model was not trained: {ended['error']}")
        return str(Registry(Storage(self._cluster.record.storage)).resolve(ended["model"]).path)

    def sharing(self) -> Side:
        """An elastic job takes what the app leaves."""
        plan = self._plan
        self._say("sharing: an elastic job takes what the app leaves")
        with self._running("elastic", "shared") as (job, base_url):
            rates = {}
            watch = JobWatch(job.run, PATIENCE_S)
            for workers in range(plan.most_workers, plan.fewest_workers - 1, -1):
                with _taken(plan.most_workers - workers):
                    rates[workers] = self._undisturbed(job, watch, workers)
            watch.until_workers(plan.most_workers)
            return self._side(job, watch, "shared", base_url, rates, None)

    def fixed(self, shared: Side) -> Side:
        """The same load for as long, and the devices stay where they are."""
        self._say("fixed split: the same load, the devices stay where they are")
        workers = self._plan.fewest_workers
        with self._running("fixed", "split") as (job, base_url):
            watch = JobWatch(job.run, PATIENCE_S)
            rates = {workers: self._undisturbed(job, watch, workers)}
            return self._side(job, watch, "split", base_url, rates, shared)

    def _side(
        self,
        job: OwnJob,
        watch: JobWatch,
        app: str,
        base_url: str,
        rates: dict[int, float],
        like: Side | None,
    ) -> Side:
        """Put the load on the app, and see what comes of it.

        Args:
            like: rounds are as long as this side's; None: as long as devices take to change hands.
        """
        load: SteadyLoad | Arrivals
        turns: list[Round] = []
        if self._plan.load == STEPS:
            load = SteadyLoad(base_url, app, PROMPT, self._plan.high, self._plan.answer_tokens, THINK_S)
            with load:
                turns = self._rounds(GiveAndTake(watch, load, LOW, self._plan.high), load, like)
            span = turns[0].rose, turns[-1].ended
        else:
            shape = self._plan.shape()
            asker = Asker(base_url, app, PROMPT, self._plan.answer_tokens)
            load = Arrivals(asker, shape.due_times(SEED))
            self._say(f"{self._plan.load}: {shape.lasts_s:.0f} s of requests as they come")
            span = load.run(watch.pause)
        logs = logs_of(self._cluster.record, job.job, app)
        return Side(span, logs, rates, load.answers, load.failures, load.first_tokens, turns)

    def _rounds(self, sharing: GiveAndTake, load: SteadyLoad, like: Side | None) -> list[Round]:
        turns: list[Round] = []
        load.level = LOW
        for number in range(self._plan.rounds):
            if like is None:
                turn = sharing.round(self._plan.most_workers, hold_s=HOLD_S, rest_s=HOLD_S)
            else:
                turn = sharing.again(like.rounds[number])
            turns.append(turn)
            failed = sum(failure.sent >= turn.rose for failure in load.failures)
            self._say(
                f"round {number + 1}: high for {turn.fell - turn.rose:.1f} s,"
                f" low for {turn.ended - turn.fell:.1f} s, {turn.workers_before} →"
                f" {turn.workers_under_load} workers under load, {failed} requests failed"
            )
        return turns

    @contextmanager
    def _running(self, name: str, app: str) -> Iterator[tuple[OwnJob, str]]:
        """A job and an app beside it, which have the cluster for themselves; yields its base URL, too."""
        from serve_apps.commands import remove

        base_url = self._cluster.serve([app])
        changes = {}
        if not self._plan.paced:
            data = self._cluster.loaded.resolved.train_jobs[name].data.model_dump()
            changes = {"data": {**data, "tokenizer": self.model}}
        job = self._cluster.submit(name, changes)
        yield job, base_url
        # Not after an error: the cluster goes then, and they with it.
        job.stop()
        remove([app])

    def _undisturbed(self, job: OwnJob, watch: JobWatch, workers: int) -> float:
        """Samples a second of the next seconds with so many workers, after a few that do not count."""
        watch.until_workers(workers)
        watch.pause(WARM_UP_S)
        first = time.time()
        watch.pause(UNDISTURBED_S)
        found = rate(job.metrics(), first, time.time())
        self._say(f"undisturbed, {workers} workers train {found:.0f} samples/s")
        return found


@contextmanager
def _taken(devices: int) -> Iterator[None]:
    """So many devices that training has to give up, as it does for an app."""
    if not devices:
        yield
        return
    from cluster.sharing.client import BrokerClient

    broker, ended = BrokerClient(), threading.Event()
    demand = Demand("bench/undisturbed", "serving", {DEVICE: 1.0}, devices, devices)
    grant = broker.wait(demand, timeout_s=60.0)

    def keep() -> None:
        while not ended.wait(_RENEW_S):
            broker.request(Demand(demand.holder, "serving", demand.unit, devices, devices, grant.nodes))

    keeper = threading.Thread(target=keep, name="keeps devices", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        broker.release(demand.holder)
