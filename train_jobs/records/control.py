"""The one writer of a run's logs, and the way to reach its workers: a small actor beside the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor, NoActorError
from cluster.files.storage import Storage
from cluster.files.time_limit import within
from train_jobs.records.run_log import RunLog, node_of, now, read_events

_PATIENCE_S = 2.0
"""What an answer waits for the storage to have taken its line, while the storage answers."""
_LAST_S = 30.0
_READ_S = 10.0


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

    The storage is read and written in threads: one that hangs holds nobody up who asks here. While it
    answers, the actor does so only when a line is written: what was answered is not lost with its process.
    """

    def __init__(self, run_location: str) -> None:
        storage = Storage(run_location)
        self.log = RunLog(storage)
        self.stopping = False
        self.step = 0
        self._lines = Lines()
        self._started: set[int] = set()
        self._starts: dict[str | None, Mapping[str, Any]] = {}
        """By group, how it was last started."""
        self._turn: tuple[int, Sequence[str]] | None = None
        self._trouble = False
        # Without what was logged before, a line may be logged twice, and a straggler have no node.
        nothing: list[dict[str, Any]] = []
        for event in within(_READ_S, lambda: read_events(storage), otherwise=nothing):
            self._take_in(event)

    def metric(self, line: dict[str, Any], group: str) -> dict[str, bool]:
        """Log one step that a group reports; the answer says what is asked of all ranks."""
        if self._lines.is_new(line, group):
            self.log.metric({"time": now(), **line})
            self.step = line["step"]
            self._settle()
        return {"stop": self.stopping}

    def missed_metric(self, line: dict[str, Any], group: str) -> None:
        """Log a step that another group's rank may have died with."""
        if line["step"] > self.step:
            self.metric(line, group)

    def event(self, kind: str, **facts: Any) -> None:
        if kind.startswith("straggler"):  # ranks do not know on which nodes the other groups are
            facts["node"] = node_of(facts["rank"], facts.get("group"), self._starts.values())
        if kind == "started":
            self._lines.started(facts["attempt"])
        self._take_in({"kind": kind, **facts})
        self.log.event(now(), kind, soon=kind == "checkpointed", **facts)
        if kind == "finished":
            self.log.wait(_LAST_S)  # others wait for the end of the job, and nobody writes it later
        self._settle()

    def _take_in(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "started":
            self._started.add(event["attempt"])
            self._starts[event.get("group")] = event
        if event["kind"] == "resized":
            self._lines.resized(event["lost"], event.get("members", ()))

    def _settle(self) -> None:
        """Wait for a moment until all is written, unless the storage is in trouble; say so when it is."""
        if self.log.appends:
            written = self.log.wait(0.0 if self._trouble else _PATIENCE_S)
        else:
            written = self.log.trouble is None
        if not written and not self._trouble:
            trouble = self.log.trouble or "the storage does not answer"
            print(f"metrics and events cannot be written for now: {trouble}", flush=True)
        self._trouble = not written

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
