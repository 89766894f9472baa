"""The one writer of a run's logs, and the way to reach its workers: a small actor beside the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from cluster.named_actor import NamedActor, NoActorError
from cluster.storage import Storage, StorageError
from train_jobs.run_log import RunLog, node_of, now

NAMESPACE = "shoal"
_FLUSH_S = 2.0
_LAST_S = 30.0
_AGAIN_S = 0.5


def control_name(job: str) -> str:
    """Name of a job's control actor in Shoal's namespace."""
    return f"shoal-job-{job}"


class Lines:
    """Tells a step that was done again from one that two groups, which did it together, both report.

    A group that stood still after it had counted a step may report it when the others have taken it for lost,
    have reported the step themselves, or done it again, and have gone on.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._started: set[int] = set()
        self._lost: set[str] = set()

    def started(self, attempt: int) -> None:
        """An attempt begins: the step that it reports next was done after the last one that was reported."""
        self._started.add(attempt)

    def resized(self, lost: Iterable[str], members: Iterable[str]) -> None:
        """These groups take part from now on."""
        self._lost = (self._lost | set(lost)) - set(members)

    def is_new(self, line: Mapping[str, Any], group: str | None = None) -> bool:
        """Whether this line of metrics, reported by this group, belongs in the log."""
        if group in self._lost:
            return False
        this = (line["step"], line["loss"])
        if this == self._last and line["attempt"] not in self._started:
            return False
        self._last = this
        self._started.clear()
        return True


@ray.remote(num_cpus=0, max_concurrency=1, max_restarts=-1, max_task_retries=-1)
class JobControl:
    """Takes metrics and events from the ranks and the driver, and hands out what is asked of the ranks.

    It is owned by the driver and ends with it. What it forgets in a restart it soon hears again: the ranks
    name their step in every metric, and the driver repeats that the job is to stop. A line that was on its
    way then may be logged twice.
    """

    def __init__(self, run_location: str) -> None:
        self.log = RunLog(Storage(run_location))
        self.stopping = False
        self.step = 0
        self._lines = Lines()
        self._started: set[int] = set()
        self._turn: tuple[int, Sequence[str]] | None = None
        self._flush_at = 0.0
        self._trouble = False
        with suppress(StorageError):  # without them a line may be logged twice
            for event in self.log.events():
                if event["kind"] == "resized":
                    self._lines.resized(event["lost"], event.get("members", ()))

    def metric(self, line: dict[str, Any], group: str) -> dict[str, bool]:
        """Log one step that a group reports; the answer says what is asked of all ranks."""
        if self._lines.is_new(line, group):
            self._write(lambda: self.log.metric({"time": now(), **line}))
            self.step = line["step"]
            self._flush_now_and_then()
        return {"stop": self.stopping}

    def missed_metric(self, line: dict[str, Any], group: str) -> None:
        """Log a step that another group's rank may have died with."""
        if line["step"] > self.step:
            self.metric(line, group)

    def event(self, kind: str, **facts: Any) -> None:
        if kind.startswith("straggler"):  # ranks do not know on which nodes the other groups are
            facts["node"] = node_of(facts["rank"], facts.get("group"), self.log.events())
        if kind == "started":
            self._lines.started(facts["attempt"])
            self._started.add(facts["attempt"])
        if kind == "resized":
            self._lines.resized(facts["lost"], facts["members"])
        self._write(lambda: self.log.event(now(), kind, **facts))
        if kind == "finished":
            self._flush_at_last()
        else:
            self._flush_now_and_then(soon=kind == "checkpointed")

    def _flush_now_and_then(self, *, soon: bool = False) -> None:
        """People follow the logs: where they are written whole, it happens every few seconds."""
        began = time.monotonic()
        if began < self._flush_at and not soon:
            return
        self._write(self.log.flush)
        # Never more than a small share of the time, however long the logs are.
        self._flush_at = time.monotonic() + max(_FLUSH_S, 20 * (time.monotonic() - began))

    def _flush_at_last(self) -> None:
        """Have the end of the job written, for which others wait; nobody writes it later."""
        deadline = time.monotonic() + _LAST_S
        while not self._write(self.log.flush) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)

    def _write(self, write: Callable[[], None]) -> bool:
        """Whether it was written. A storage that takes nothing now is no reason for the ranks to fail."""
        try:
            write()
        except StorageError as error:  # the next one writes all of it
            if not self._trouble:
                print(f"metrics.jsonl and events.jsonl cannot be written for now: {error}", flush=True)
            self._trouble = True
            return False
        self._trouble = False
        return True

    def stop(self) -> None:
        """Ask the ranks to save and leave at the next step boundary."""
        self.stopping = True

    def go_on(self) -> None:
        """The ranks that were asked to stop have done so; those that come next go on."""
        self.stopping = False

    def is_stopping(self) -> bool:
        return self.stopping

    def begin(self, attempt: int, nodes: Sequence[str]) -> None:
        """It is the turn of this attempt, on these nodes: of those before it nobody steps any more."""
        self._turn = attempt, nodes

    def is_turn(self, attempt: int, nodes: Sequence[str]) -> bool:
        return self._turn == (attempt, nodes)

    def last_step(self) -> int:
        return self.step

    def has_started(self, attempt: int) -> bool:
        """Whether all ranks of an attempt have met, and have their state."""
        return attempt in self._started


def find_control(job: str) -> NamedActor | None:
    """The control actor of a job that runs, else None."""
    control = NamedActor(control_name(job), NAMESPACE)
    try:
        control.find()
    except NoActorError:
        return None
    return control
