"""Drills: something of the serving side is killed or stopped under load, and what clients saw is judged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from cluster.config.sections.serve import ServeAppConfig
from cluster.hosts.processes import NODE_NAME
from serve_apps.spec import AppSpec
from tests.clusters import LiveCluster
from tests.serve_apps import driver
from tests.serve_apps.drill_load import DrillLoad, Seen, drill_load
from tests.serve_apps.driver import Driver
from tests.serve_apps.fake_engine import make_fake_model
from tests.serve_apps.notes import Notes, notes_of
from tests.serve_apps.tiny_model import make_model

THREE_WORKERS = (
    "nodes: [{name: head, cpus: 0}, {name: worker, count: 3, cpus: 2}]",
    "storage: ./storage",
)
STEP_TIMEOUT_S = 5.0
"""How long the torch engine's ranks wait for one another in the drills; the default is 30 s."""
AFTERWARDS_S = 1.5
"""How long the load goes on when capacity is back."""
POLL_S = 0.05


@dataclass(frozen=True)
class App:
    """What is served in a drill, and with how much load: about half of what its two replicas run at once."""

    engine: str
    make: Callable[[Path], object]
    batch: int
    clients: int
    max_tokens: int
    engine_kwargs: dict[str, float] = field(default_factory=dict)
    ready_timeout_s: float = 300.0

    def spec(self, path: Path, tensor: int) -> AppSpec:
        self.make(path)
        config = ServeAppConfig.model_validate(
            {
                "model": str(path),
                "tensor": tensor,
                "replicas": {"min": 2},
                "engine_kwargs": self.engine_kwargs,
                "update": {"ready_timeout_s": self.ready_timeout_s},
                "limits": {"max_tokens": 2000, "queue": 100, "batch": self.batch, "request_timeout_s": 60.0},
            }
        )
        return AppSpec("chat", config, model_path=str(path), model_version="m@1", engine=self.engine)


FAKE = App("tests.serve_apps.noting_fake_engine:Engine", make_fake_model, 8, 8, 100)
TORCH = App(
    "tests.serve_apps.noting_torch_engine:Engine",
    make_model,
    4,
    4,
    100,
    {"step_timeout_s": STEP_TIMEOUT_S, "heartbeat_s": 0.5},
)


@dataclass(frozen=True)
class Stage:
    """An app with two replicas on a cluster."""

    cluster: LiveCluster
    call: Driver
    url: str
    app: App
    model_path: Path

    def replicas(self) -> list[Notes]:
        """The replicas whose process lives and is not stopped."""
        return [notes for notes in notes_of(self.model_path) if _runs(notes.pid)]

    def running(self) -> set[str]:
        """The requests that engines have now."""
        return {request for notes in self.replicas() for request in notes.had(time.monotonic())}

    def generations(self, request_id: str) -> int:
        """How often engines have begun to answer a client's request."""
        taken = [each for notes in notes_of(self.model_path) for each in notes.taken]
        return sum(each.partition("-")[0] == request_id for each in taken)

    def process(self, title: str) -> psutil.Process:
        """The one process of the cluster with this title."""
        (found,) = self.cluster.processes(title)
        return found

    def rank_beside(self, replica: Notes) -> int:
        """The process of rank 1 of a replica."""
        (rank,) = {each.pid for each in ranks_of(replica.pid)} - {replica.pid}
        return rank


@contextmanager
def staged(cluster: LiveCluster, app: App, directory: Path, tensor: int = 2) -> Iterator[Stage]:
    """Serve an app, and take everything down at the end."""
    with Driver(cluster.record) as call:
        stage = Stage(cluster, call, call(driver.start), app, directory)
        call(driver.deploy, app.spec(directory, tensor))
        try:
            yield stage
        finally:
            call(driver.stop)


def ranks_of(engine: int) -> list[psutil.Process]:
    """The processes of an engine's ranks: forks of one process, rank 0 among them."""
    parent = psutil.Process(engine).parent()
    assert parent is not None
    return [each for each in parent.children() if "shoal::Engine:" in " ".join(each.cmdline())]


Act = Callable[[Stage, Notes], None]
"""Does it, to a stage and the replica that is the victim."""
Back = Callable[[Stage, Notes, DrillLoad, float], bool]
"""Whether capacity is back: of a stage, after this was done to the victim at that moment."""


@dataclass(frozen=True)
class Drill:
    """One kind of accident."""

    app: App
    act: Act
    back: Back
    takes_replica: bool = False
    """A replica is lost, and its streams may end with an error."""
    takes_gateway: bool = False
    """The gateway is lost, and connections break."""
    costs_node: bool = False
    """A node is lost for good."""


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _kill_raylet(stage: Stage, victim: Notes) -> None:
    node = psutil.Process(victim.pid).environ()[NODE_NAME]
    raylets = [each for each in stage.cluster.processes("raylet") if each.name() == "raylet"]
    (raylet,) = [each for each in raylets if each.environ()[NODE_NAME] == node]
    raylet.kill()


def _drain_node(stage: Stage, victim: Notes) -> None:
    """As whoever has notice that the victim's node will go."""
    drain_node(stage.cluster, psutil.Process(victim.pid).environ()[NODE_NAME])


def drain_node(cluster: LiveCluster, name: str) -> None:
    """Say that a node will go, in ten minutes."""
    (node,) = [each.node_id for each in cluster.record.nodes if each.name == name]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    notice = ["--deadline-remaining-seconds", "600"]
    environment = {**os.environ, **cluster.environment}
    subprocess.run([*ray, *why, *notice], env=environment, check=True, capture_output=True)


def _kill_both(stage: Stage, victim: Notes) -> None:
    _kill_controller(stage, victim)
    _kill(victim.pid)


def _kill_gateway_and_controller(stage: Stage, victim: Notes) -> None:
    stage.process("ray::AppController").kill()
    stage.process("ray::ServeReplica:gateway").kill()


def _kill_controller(stage: Stage, victim: Notes) -> None:
    stage.process("ray::ServeController").kill()


def _answered_by_two(stage: Stage, victim: Notes, load: DrillLoad, since: float) -> bool:
    """Two replicas that live have been given requests since, and have answered some."""
    working = [
        notes
        for notes in stage.replicas()
        if notes.pid != victim.pid and any(ended > since for ended in notes.done.values())
    ]
    return len(working) >= 2


def _gateway_answers(stage: Stage, victim: Notes, load: DrillLoad, since: float) -> bool:
    return any(seen.answered and seen.began > since for seen in list(load.seen))


def _apps_controller_answers(stage: Stage, victim: Notes, load: DrillLoad, since: float) -> bool:
    row = stage.call(driver.status, "chat")
    return row is not None and row["status"] == "running" and row["replicas"] == 2


def _serve_controller_answers(stage: Stage, victim: Notes, load: DrillLoad, since: float) -> bool:
    return stage.call(replicas_by_deployment) == {"replica": 3}


def replicas_by_deployment() -> dict[str, int]:
    """Replicas that run, by deployment of the apps, as Serve tells; one stands by."""
    from ray import serve

    return {
        deployment: int(each.replica_states.get("RUNNING", 0))
        for name, application in serve.status().applications.items()
        if name.startswith("chat:")
        for deployment, each in application.deployments.items()
    }


DRILLS: dict[str, Drill] = {
    "rank killed": Drill(TORCH, lambda s, v: _kill(s.rank_beside(v)), _answered_by_two, takes_replica=True),
    "rank 0 killed": Drill(TORCH, lambda s, v: _kill(v.pid), _answered_by_two, takes_replica=True),
    "rank hung": Drill(
        TORCH,
        lambda s, v: os.kill(s.rank_beside(v), signal.SIGSTOP),
        _answered_by_two,
        takes_replica=True,
    ),
    "rank 0 hung": Drill(
        TORCH, lambda s, v: os.kill(v.pid, signal.SIGSTOP), _answered_by_two, takes_replica=True
    ),
    "raylet killed": Drill(FAKE, _kill_raylet, _answered_by_two, takes_replica=True, costs_node=True),
    "node drained": Drill(FAKE, _drain_node, _answered_by_two, takes_replica=True, costs_node=True),
    "gateway killed": Drill(
        FAKE,
        lambda s, v: s.process("ray::ServeReplica:gateway").kill(),
        _gateway_answers,
        takes_gateway=True,
    ),
    "gateway hung": Drill(
        FAKE,
        lambda s, v: s.process("ray::ServeReplica:gateway").suspend(),
        _gateway_answers,
        takes_gateway=True,
    ),
    "gateway and apps' controller killed": Drill(
        FAKE,
        _kill_gateway_and_controller,
        _gateway_answers,
        takes_gateway=True,
    ),
    "Serve's controller killed": Drill(FAKE, _kill_controller, _serve_controller_answers),
    "apps' controller killed": Drill(
        FAKE, lambda s, v: s.process("ray::AppController").kill(), _apps_controller_answers
    ),
    "Serve's controller and rank 0 killed": Drill(FAKE, _kill_both, _answered_by_two, takes_replica=True),
}


@dataclass(frozen=True)
class Report:
    """What became of one drill. Times in seconds."""

    kind: str
    requests: int
    answered: int
    in_flight: int
    """Requests that the victim had."""
    retried: int
    """Those of them that were answered all the same."""
    ended: int
    """Streams that had sent something and ended with an error event, all of them the victim's."""
    broken: int
    """Streams that had begun, and broke off where the gateway was killed."""
    failed: list[Seen]
    """All other requests that were not answered."""
    gone_s: float | None
    """Until the victim's process was gone, where a replica was lost: a hung one is found by then."""
    taken_s: float | None
    """Until a replica that was not there before was given a request, where one was lost."""
    back_s: float
    """Until capacity was back: two replicas had answered a request to its end."""
    longest_s: float
    """The longest time that any client waited for an answer that it got."""
    wrong: int
    """Answers that are not whole."""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.wrong


def run_drill(kind: str, stage: Stage, timeout_s: float = 240.0) -> Report:
    """Do it under load and wait until capacity is back.

    Raises:
        TimeoutError: it did not come back in time.
    """
    drill = DRILLS[kind]
    with drill_load(stage.url, stage.app.clients, max_tokens=stage.app.max_tokens) as load:
        until(lambda: len(load.seen) >= 2 * stage.app.clients, timeout_s)
        until(lambda: all(len(notes.had(time.monotonic())) > 1 for notes in stage.replicas()), timeout_s)
        victim = max(stage.replicas(), key=lambda notes: len(notes.had(time.monotonic())))
        before = {notes.pid for notes in notes_of(stage.model_path)}
        at = time.monotonic()
        drill.act(stage, victim)
        gone_s = None
        if drill.takes_replica:
            until(lambda: not psutil.pid_exists(victim.pid), timeout_s)
            gone_s = time.monotonic() - at
        until(lambda: drill.back(stage, victim, load, at), timeout_s)
        back_s = time.monotonic() - at
        threading.Event().wait(AFTERWARDS_S)
    taken_s = None
    if drill.takes_replica:
        new = [notes for notes in notes_of(stage.model_path) if notes.pid not in before]
        taken_s = min((at_s for notes in new for at_s in notes.taken.values()), default=None)
        taken_s = None if taken_s is None else taken_s - at
    report = _judge(kind, stage, victim, load, at, gone_s=gone_s, back_s=back_s)
    return replace(report, taken_s=taken_s)


def _judge(
    kind: str, stage: Stage, victim: Notes, load: DrillLoad, at: float, *, gone_s: float | None, back_s: float
) -> Report:
    drill = DRILLS[kind]
    had: set[str] = set()
    if drill.takes_replica:
        notes = next(each for each in notes_of(stage.model_path) if each.pid == victim.pid)
        had = {request_id.partition("-")[0] for request_id in notes.had(at)}
    answered = [seen for seen in load.seen if seen.answered]
    ended = [s for s in load.seen if drill.takes_replica and s.ended_by_event and s.replica == victim.replica]
    broken = [s for s in load.seen if drill.takes_gateway and s.broken and s.begun]
    excused = {seen.request_id for seen in (*answered, *ended, *broken)}
    return Report(
        kind=kind,
        requests=len(load.seen),
        answered=len(answered),
        in_flight=len(had),
        retried=sum(seen.request_id in had for seen in answered),
        ended=len(ended),
        broken=len(broken),
        failed=[seen for seen in load.seen if seen.request_id not in excused],
        gone_s=gone_s,
        taken_s=None,
        back_s=back_s,
        longest_s=max((seen.ended - seen.began for seen in answered), default=0.0),
        wrong=sum(seen.text != answered[0].text for seen in answered),
    )


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def until(condition: Callable[[], Any], timeout_s: float) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it did not hold in time.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"it did not happen in {timeout_s:g} s")
        threading.Event().wait(POLL_S)
