"""What a job tells the broker of its failures."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import ShoalError
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand, Grant
from train_jobs.driver.failures import classify
from train_jobs.driver.job_lease import JobLease
from train_jobs.group.outcome import RankFailure


class Broker:
    """Takes what it is told, unless it is away."""

    def __init__(self, *, away: bool = False) -> None:
        self.away = away
        self.told: list[tuple[Any, ...]] = []

    def blame(self, *arguments: Any, elsewhere: bool) -> None:
        if self.away:
            raise ShoalError("the broker did not answer within 20 s")
        self.told.append((*arguments, elsewhere))


def told_of(failure: RankFailure, broker: Broker, alive: set[str]) -> list[tuple[Any, ...]]:
    lease = JobLease("lm-1", TrainJobConfig(), cast(BrokerClient, broker))
    lease.blame(classify([failure], ["n1", "n2"], alive, {}), 7, elsewhere=True)
    return broker.told


DEAD = RankFailure(1, None, "RankDied", "killed by SIGKILL", "", died=True)
MISTAKE = RankFailure(1, 7, "KeyError", "'x'", "")


def test_failures_that_may_be_a_nodes_are_told_and_mistakes_are_not() -> None:
    both = {"n1", "n2"}
    assert told_of(DEAD, Broker(), both) == [("n2", "job/lm-1", "worker", 7, True)]
    assert told_of(MISTAKE, Broker(), both) == []
    assert told_of(MISTAKE, Broker(), {"n2"}) == [("n1", "job/lm-1", "node", 7, True)]


def test_a_broker_that_is_away_stops_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    told_of(DEAD, Broker(away=True), {"n1", "n2"})
    assert capsys.readouterr().out == (
        "the failure of n2 could not be reported: the broker did not answer within 20 s\n"
    )


def test_workers_of_a_node_are_one_unit_and_no_two_units_share_a_node() -> None:
    asked: list[Demand] = []
    watched: list[dict[str, Grant]] = []

    class Asked(Broker):
        def request(self, demand: Demand) -> Grant:
            asked.append(demand)
            return Grant(demand.holder, ("n1", "n2"))

        def watch(self, known: dict[str, Grant], hold_s: float) -> object:
            watched.append(known)
            return "news"

    workers = {"min": 4, "max": 12, "per_node": 4, "cpus": 2, "gpus": 1}
    config = TrainJobConfig.model_validate({"task": "script", "script": "a.py", "workers": workers})
    lease = JobLease("lm-1", config, cast(BrokerClient, Asked()))
    grant = lease.renew(["n1"])
    assert grant is not None
    assert lease.workers(grant) == 8
    assert (lease.news, watched) == (("news",), [{"job/lm-1": grant}])
    (demand,) = asked
    assert (demand.unit, demand.min, demand.max, demand.apart) == ({"CPU": 8.0, "GPU": 4.0}, 1, 3, True)
