"""The one writer of a run's logs, and the way to reach its workers: a small actor beside the driver."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor, NoActorError
from cluster.files.storage import Storage
from cluster.files.time_limit import within
from train_jobs.records.run_log import MetricKey, RunLog, metric_key, node_of, now, read_events

PATIENCE_S = 2.0
"""What an answer waits for a storage that says nothing to have taken its line."""
_LAST_S = 30.0
_READ_S = 10.0
SAVES_FOR_S = 2.0
"""So long a group counts as saving after a word of that."""


def control_name(job: str) -> str:
    """Name of a job's control actor in Shoal's namespace."""
    return f"shoal-job-{job}"


class JobControl:
    """Takes metrics and events from the ranks and the driver, and hands out what is asked of the ranks.

    It is owned by the driver and ends with it. What it forgets in a restart it soon hears again: the ranks
    name their step in every metric, and the driver repeats that the job is to stop. A line that was on its
    way then may be logged twice: whoever reads the log takes it once (train_jobs.records.run_log).

    The storage is read and written in threads: one that hangs holds nobody up who asks here. While it
    answers, the actor does so only when an event is written, and a metric where the storage can append: what
    was answered is not lost with its process. Metrics that are not written yet are kept by who sent them, and
    sent again to the actor's next life.
    """

    def __init__(self, run_location: str) -> None:
        storage = Storage(run_location)
        self.log = RunLog(storage)
        self._life = uuid.uuid4().hex
        self.stopping = False
        self.step = 0
        self._last: MetricKey = (0, 0, 0, 0)
        """Of the line that was logged last."""
        self._started: set[int] = set()
        self._starts: dict[str | None, Mapping[str, Any]] = {}
        """By group, how it was last started."""
        self._turn: tuple[int, Sequence[str]] | None = None
        self._trouble = False
        self._script_saves = 0
        self._saves: dict[str, float] = {}
        """When a rank of a group has last said that it saves."""
        # Without what was logged before, a straggler may have no node.
        nothing: list[dict[str, Any]] = []
        for event in within(_READ_S, lambda: read_events(storage), otherwise=nothing):
            self._take_in(event)

    def metrics(self, lines: Sequence[dict[str, Any]], life: str | None = None) -> dict[str, Any]:
        """Log steps that a group reports.

        Of groups that did a step together several may report it, and one that stood still reports what the
        others have left behind them: what is not beyond the last line is no news.

        Args:
            lines: in the order of the steps.
            life: of the control that has what was sent before; None at first.

        Returns:
            `stop`: the ranks are asked to. `life`: this control's. `taken`: False where it is not that of
            `life`, and logs these lines only after those before them. `unwritten`: so many lines, the last
            ones, are lost if this process ends now.
        """
        if taken := life in (None, self._life):
            for line in lines:
                if (key := metric_key(line)) > self._last:
                    self._last, self.step = key, line["step"]
                    self.log.metric({"time": now(), **line})
            self._settle(patient=self.log.appends)
        unwritten = self.log.unwritten_metrics
        return {"stop": self.stopping, "life": self._life, "taken": taken, "unwritten": unwritten}

    def event(self, kind: str, **facts: Any) -> None:
        if kind.startswith("straggler"):  # ranks do not know on which nodes the other groups are
            facts["node"] = node_of(facts["rank"], facts.get("group"), self._starts.values())
        self._take_in({"kind": kind, **facts})
        self.log.event(now(), kind, **facts)
        if kind == "finished":
            self.log.wait(_LAST_S)  # others wait for the end of the job, and nobody writes it later
        self._settle(patient=True)

    def _take_in(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "started":
            self._started.add(event["attempt"])
            self._starts[event.get("group")] = event
        elif event["kind"] == "saved":
            self._script_saves += 1

    def _settle(self, *, patient: bool) -> None:
        """Say so when the storage is in trouble; who is patient waits for a moment until all is written."""
        if patient:
            written = self.log.answered(0.0 if self._trouble else PATIENCE_S)
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

    def saves(self, group: str) -> None:
        """A rank of this group writes a checkpoint or the model, now."""
        self._saves[group] = time.monotonic()

    def is_saving(self, group: str) -> bool:
        """Whether a rank of this group has said so a moment ago."""
        return time.monotonic() - self._saves.get(group, -math.inf) < SAVES_FOR_S

    def is_stopping(self) -> bool:
        return self.stopping

    def begin(self, attempt: int, nodes: Sequence[str]) -> None:
        """It is the turn of this attempt, on these nodes: of those before it nobody steps any more."""
        self._turn = attempt, nodes

    def is_turn(self, attempt: int, nodes: Sequence[str]) -> bool:
        return self._turn == (attempt, nodes)

    def last_step(self) -> int:
        return self.step

    def script_saves(self) -> int:
        """How often the job's script has saved something."""
        return self._script_saves

    def has_started(self, attempt: int) -> bool:
        """Whether all ranks of an attempt have met, and have their state."""
        return attempt in self._started


JobControlActor = ray.remote(num_cpus=0, max_concurrency=1, max_restarts=-1, max_task_retries=-1)(JobControl)


def find_control(job: str) -> NamedActor | None:
    """The control actor of a job that runs, else None."""
    control = NamedActor(control_name(job), NAMESPACE)
    try:
        control.find()
    except NoActorError:
        return None
    return control
