"""Sharing measured on a cluster of its own, beside a fixed split under the same load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.sharing.demand import Demand
from infra.lab.bench.clients import SteadyLoad
from infra.lab.bench.give_and_take import GiveAndTake, logs_of
from infra.lab.bench.load_course import Round
from infra.lab.bench.own_cluster import OwnCluster, OwnJob
from infra.lab.bench.side import DEVICE, Side
from infra.lab.bench.training_rate import rate

MOST_WORKERS = 3
FEWEST_WORKERS = 2
"""Of the job, while the app has its most replicas."""
MOST_REPLICAS = 2
LOW, HIGH = 1, 8
"""Clients that ask while the load is low, and while it is high."""
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

_MODEL = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 2048}
_JOB: dict[str, Any] = {
    "model": _MODEL,
    "data": {"source": "python-stdlib", "sequence_length": 64, "held_out_every": 50},
    "batch": {"global": 24, "micro": 4},
    "evaluate": {"every_steps": None},
    "checkpoint": {"every_steps": 1000},
    "steps": 1_000_000,
}
_APP: dict[str, Any] = {
    "model": "served@latest",
    # More requests in flight than one replica should carry while the load is high, fewer while it is low.
    "autoscale": {"target_ongoing_requests": 3, "upscale_delay_s": 1, "downscale_delay_s": 3},
}
CONFIG: dict[str, Any] = {
    "cluster": {
        "nodes": [{"name": "head", "cpus": 0}, {"name": "worker", "count": 2, "cpus": 2}],
        "sharing": {"priority": "serving", "settle_s": 1},
    },
    "train_jobs": {
        "served": {
            **_JOB,
            "steps": 20,
            "checkpoint": {"every_steps": 20},
            "batch": {"global": 8, "micro": 4},
            "workers": {"min": 1, "max": 1},
            "publish": "served",
        },
        "elastic": {**_JOB, "workers": {"min": 1, "max": MOST_WORKERS}},
        "fixed": {**_JOB, "workers": {"min": FEWEST_WORKERS, "max": FEWEST_WORKERS}},
    },
    "serve_apps": {
        "shared": {**_APP, "replicas": {"min": 1, "max": MOST_REPLICAS}},
        "split": {**_APP, "replicas": {"min": MOST_REPLICAS, "max": MOST_REPLICAS}},
    },
}


def measure(rounds: int, say: Callable[[str], None]) -> tuple[Side, Side]:
    """Both sides, sharing first: the fixed split gets a load that rises and falls for as long.

    Raises:
        ShoalError: devices did not change hands in time, or a job or an app could not be started.
    """
    with OwnCluster(CONFIG, say) as cluster:
        tokenizer = _publish(cluster, say)
        shared = _share(cluster, tokenizer, rounds, say)
        return shared, _split(cluster, tokenizer, shared.rounds, say)


def _publish(cluster: OwnCluster, say: Callable[[str], None]) -> str:
    """Train the model that is served; returns its directory: its tokenizer serves others, too."""
    from cluster.models.registry import Registry

    say("training the model that is served")
    job = cluster.submit("served")
    (ended,) = job.until(lambda: job.events("finished"), "the model was not trained", PATIENCE_S)
    if ended["status"] != "succeeded":
        raise ShoalError(f"the model was not trained: {ended['error']}")
    return str(Registry(Storage(cluster.record.storage)).resolve(ended["model"]).path)


def _share(cluster: OwnCluster, tokenizer: str, rounds: int, say: Callable[[str], None]) -> Side:
    say("sharing: an elastic job takes what the app leaves")
    with _running(cluster, "elastic", "shared", tokenizer) as (job, base_url):
        load = SteadyLoad(base_url, "shared", PROMPT, HIGH, pause_s=THINK_S)
        turns: list[Round] = []
        with load:
            sharing = GiveAndTake(job.run, load, LOW, HIGH, PATIENCE_S)
            rates = {}
            for workers in range(MOST_WORKERS, FEWEST_WORKERS - 1, -1):
                with _taken(MOST_WORKERS - workers):
                    sharing.until_workers(workers)
                    rates[workers] = _undisturbed(sharing, job)
                say(f"undisturbed, {workers} workers train {rates[workers]:.0f} samples/s")
            load.level = LOW
            for number in range(1, rounds + 1):
                turns.append(sharing.round(MOST_WORKERS, hold_s=HOLD_S, rest_s=HOLD_S))
                _tell(number, turns[-1], load, say)
    return _side(cluster, job, "shared", turns, rates, load)


def _split(cluster: OwnCluster, tokenizer: str, rounds: Sequence[Round], say: Callable[[str], None]) -> Side:
    say("fixed split: the same load for as long, the devices stay where they are")
    with _running(cluster, "fixed", "split", tokenizer) as (job, base_url):
        load = SteadyLoad(base_url, "split", PROMPT, HIGH, pause_s=THINK_S)
        turns: list[Round] = []
        with load:
            sharing = GiveAndTake(job.run, load, LOW, HIGH, PATIENCE_S)
            sharing.until_workers(FEWEST_WORKERS)
            rates = {FEWEST_WORKERS: _undisturbed(sharing, job)}
            say(f"undisturbed, {FEWEST_WORKERS} workers train {rates[FEWEST_WORKERS]:.0f} samples/s")
            load.level = LOW
            for number, like in enumerate(rounds, 1):
                turns.append(sharing.again(like))
                _tell(number, turns[-1], load, say)
    return _side(cluster, job, "split", turns, rates, load)


@contextmanager
def _running(cluster: OwnCluster, name: str, app: str, tokenizer: str) -> Iterator[tuple[OwnJob, str]]:
    """A job and an app beside it, which have the cluster for themselves; yields the app's base URL, too."""
    from serve_apps.commands import remove

    base_url = cluster.serve([app])
    data = cluster.loaded.resolved.train_jobs[name].data.model_dump()
    job = cluster.submit(name, {"data": {**data, "tokenizer": tokenizer}})
    yield job, base_url
    # Not after an error: the cluster goes then, and they with it.
    job.stop()
    remove([app])


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


def _undisturbed(sharing: GiveAndTake, job: OwnJob) -> float:
    """Samples a second of the next seconds, after a few that do not count."""
    sharing.pause(WARM_UP_S)
    first = time.time()
    sharing.pause(UNDISTURBED_S)
    return rate(job.metrics(), first, time.time())


def _tell(number: int, turn: Round, load: SteadyLoad, say: Callable[[str], None]) -> None:
    failed = sum(failure.sent >= turn.rose for failure in load.failures)
    say(
        f"round {number}: high for {turn.fell - turn.rose:.1f} s, low for {turn.ended - turn.fell:.1f} s,"
        f" {turn.workers_before} → {turn.workers_under_load} workers under load, {failed} requests failed"
    )


def _side(
    cluster: OwnCluster,
    job: OwnJob,
    app: str,
    rounds: Sequence[Round],
    rates: dict[int, float],
    load: SteadyLoad,
) -> Side:
    logs = logs_of(cluster.record, job.job, app)
    return Side(rounds, logs, rates, load.answers, load.failures, load.first_tokens)
