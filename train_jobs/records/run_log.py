"""The two logs of a run, `metrics` and `events`, and what can be read out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cluster.files.backend import StorageError
from cluster.files.line_reader import LineReader, read_lines
from cluster.files.line_writer import LineWriter
from cluster.files.storage import Storage

METRICS = "metrics"
EVENTS = "events"
"""Names of the logs: where the storage can append they are the files `metrics.jsonl` and `events.jsonl`."""

FINAL_STATUSES = ("succeeded", "failed", "stopped")
_LAST_S = 60.0


def now() -> str:
    """The time as events carry it: ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RunLog:
    """Writes the logs of one run, lines whole and in order.

    Nothing waits for the storage but `wait` and `close`. A line that the storage does not take now is kept,
    and written as soon as it does.

    Args:
        storage: the run's directory, which is there: where it is not, nothing is written until it is back.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._writer = LineWriter(storage, made=True)

    @property
    def appends(self) -> bool:
        """Whether each line is written as it comes; elsewhere those of a few seconds are, together."""
        return self._storage.appendable

    @property
    def trouble(self) -> str | None:
        """Why nothing could be written when that was last tried."""
        return self._writer.trouble

    @property
    def unwritten_metrics(self) -> int:
        """Lines that the storage does not have yet."""
        return self._writer.unwritten(METRICS)

    def metric(self, line: Mapping[str, Any]) -> None:
        self._writer.add(METRICS, [line])

    def event(self, time: str, kind: str, **facts: Any) -> None:
        """Record an event; `time` is ISO 8601 in UTC."""
        self._writer.add(EVENTS, [{"time": time, "kind": kind, **facts}])

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is written, however often the storage fails; whether that was so in time."""
        return self._writer.written(timeout_s)

    def answered(self, timeout_s: float) -> bool:
        """Wait until all is written, or the storage is failing; whether it is written."""
        return self._writer.answered(timeout_s)

    def close(self) -> None:
        """Write what is left.

        Raises:
            StorageError: the storage does not take it, or does not answer.
        """
        written = self._writer.written(_LAST_S, patient=False)
        self._writer.close(0.0)
        if not written:
            trouble = self._writer.trouble or f"it did not answer within {_LAST_S:.0f} s"
            raise StorageError(f"metrics and events cannot be written in {self._storage.location}: {trouble}")


def read_events(storage: Storage) -> list[dict[str, Any]]:
    """All events of a run, in order; a line that is none is left out."""
    return [line for line in read_lines(storage, EVENTS) if "kind" in line]


MetricKey = tuple[int, int, int, int]


def metric_key(line: Mapping[str, Any]) -> MetricKey:
    """What a line of metrics is known by, and its place among the others.

    The attempt; when within it all groups last began from a checkpoint, since none had a state any more; how
    often the job went back to one by itself, what it did before counting for nothing then; and the step. Two
    lines of one key tell of the same step: two groups did it together, or somebody could not know whether
    another had said it already.
    """
    return line["attempt"], line.get("began", 0), line.get("went_back", 0), line["step"]


def read_all_metrics(storage: Storage) -> list[dict[str, Any]]:
    """Every line of metrics once, in the order of the job: a step that ran again is there again."""
    by_key = {metric_key(line): line for line in read_lines(storage, METRICS)}
    return [by_key[key] for key in sorted(by_key)]


def read_metrics(storage: Storage) -> list[dict[str, Any]]:
    """The metrics of every step, in order of the steps: of a step that ran again, the last line counts."""
    by_step = {line["step"]: line for line in read_all_metrics(storage)}
    return [by_step[step] for step in sorted(by_step)]


def has_saved(storage: Storage) -> bool:
    """Whether the run has ever saved a checkpoint.

    Raises:
        StorageError: its directory is not there, as where a mount was lost.
    """
    if storage.appendable and not storage.exists():
        raise StorageError(f"cannot read {storage.location}: it is not there any more")
    return any(event["kind"] == "checkpointed" for event in read_events(storage))


def node_of(rank: int, group: str | None, events: Iterable[Mapping[str, Any]]) -> str | None:
    """The node where a rank is, as its group said when it was last started; None where it did not."""
    node = None
    for event in events:
        if event["kind"] == "started" and event.get("group") == group:
            node = next((each["node"] for each in event.get("ranks", ()) if each["rank"] == rank), node)
    return node


@dataclass
class RunSummary:
    """A run as its events tell it."""

    job: str
    name: str = ""
    status: str = "submitted"
    task: str | None = None
    step: int = 0
    steps: int = 0
    """All there are; 0 of a script that does not say."""
    workers: int = 0
    attempts: int = 0
    submitted_at: str = ""
    submission_id: str | None = None
    world_sizes: list[int] = field(default_factory=list)
    metrics: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    totals: dict[str, Any] | None = None
    skipped: int = 0
    """Steps whose update was left out."""
    went_back: int = 0
    """Times that the job went back to a checkpoint for a loss."""
    stragglers: list[dict[str, Any]] = field(default_factory=list)
    """The ranks that are slower than the others now: `group` (of several), `rank`, `node`, `times_slower`."""
    trained: str | None = None
    """What of a script has run to its end, as `train_jobs.spec.command_digest` names it."""
    model: str | None = None
    error: str | None = None
    exit_code: int = 1
    """That of the driver, and of the command that followed it."""

    @property
    def ended(self) -> bool:
        return self.status in FINAL_STATUSES

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in one event; an unknown kind, or none, changes nothing."""
        handler = getattr(self, f"_on_{event.get('kind')}", None)
        if handler is not None:
            handler(event)

    def _on_submitted(self, event: Mapping[str, Any]) -> None:
        self.name, self.steps = event["name"], event["steps"]
        self.submitted_at = self.submitted_at or event["time"]
        self.submission_id = event.get("submission_id") or self.submission_id
        self.status, self.error, self.workers = "submitted", None, 0

    def _on_preparing(self, event: Mapping[str, Any]) -> None:
        self.status, self.task = "preparing", event.get("task")

    def _on_waiting(self, event: Mapping[str, Any]) -> None:
        self.status, self.workers = "waiting", 0

    def _on_leased(self, event: Mapping[str, Any]) -> None:
        self.status, self.workers = "starting", event["workers"]

    def _on_started(self, event: Mapping[str, Any]) -> None:
        # Groups of one attempt start one by one; how many ranks step together they say themselves.
        another = self.status == "running" and self.attempts == event["attempt"]
        self.status, self.attempts = "running", event["attempt"]
        self._take_workers(event.get("workers", event["world_size"]), anew=not another)
        self.step = max(self.step, event["step"]) if another else event["step"]
        if not another:
            self.stragglers = []

    def _on_resized(self, event: Mapping[str, Any]) -> None:
        self._take_workers(event["world_size"], anew=False)

    def _take_workers(self, workers: int, *, anew: bool) -> None:
        if anew or not self.world_sizes or self.world_sizes[-1] != workers:
            self.world_sizes.append(workers)
        self.workers = workers

    def _on_checkpointed(self, event: Mapping[str, Any]) -> None:
        self.step = max(self.step, event["step"])

    def _on_evaluated(self, event: Mapping[str, Any]) -> None:
        self.evaluation = {
            key: value for key, value in event.items() if key not in ("time", "kind", "attempt")
        }

    def _on_measured(self, event: Mapping[str, Any]) -> None:
        self.totals = {key: value for key, value in event.items() if key not in ("time", "kind")}

    def _on_step_skipped(self, event: Mapping[str, Any]) -> None:
        self.skipped += 1

    def _on_went_back(self, event: Mapping[str, Any]) -> None:
        self.went_back += 1
        self.step = event["to"]

    def _on_straggler(self, event: Mapping[str, Any]) -> None:
        self._on_straggler_over(event)
        keys = ("group", "rank", "node", "times_slower")
        self.stragglers.append({key: event[key] for key in keys if key in event})

    def _on_straggler_over(self, event: Mapping[str, Any]) -> None:
        which = (event.get("group"), event["rank"])
        self.stragglers = [each for each in self.stragglers if (each.get("group"), each["rank"]) != which]

    def _on_failed(self, event: Mapping[str, Any]) -> None:
        if not event.get("goes_on"):
            self.status, self.workers = "recovering", 0

    def _on_trained(self, event: Mapping[str, Any]) -> None:
        self.trained = event["command"]

    def _on_published(self, event: Mapping[str, Any]) -> None:
        self.model = event["model"]

    def _on_finished(self, event: Mapping[str, Any]) -> None:
        self.status, self.step, self.error = event["status"], event["step"], event.get("error")
        self.exit_code = event.get("exit_code", 1)
        self.workers = 0


class RunFollower:
    """A run as its events tell it, for whoever looks at it again and again: only what is new is read.

    What its metrics alone tell is left out: the last line of them, and the steps since an event told of one.

    Args:
        storage: the run's directory.
    """

    def __init__(self, job: str, storage: Storage) -> None:
        self._summary = RunSummary(job)
        self._events = LineReader(storage, EVENTS)

    def look(self) -> RunSummary:
        """The run as it is told now.

        Raises:
            StorageError: the storage cannot be read; the next look takes in what this one did not.
        """
        for event in self._events.new():
            self._summary.apply(event)
        return self._summary


def summarize(job: str, storage: Storage) -> RunSummary:
    """The state of a run, from its two logs."""
    return summary_of(job, read_events(storage), read_all_metrics(storage))


def summary_of(job: str, events: Iterable[Mapping[str, Any]], metrics: list[dict[str, Any]]) -> RunSummary:
    """The state of a run, from all lines of its two logs in their order."""
    summary = RunSummary(job)
    for event in events:
        summary.apply(event)
    if metrics:
        furthest = max(line["step"] for line in metrics)
        summary.metrics = next(line for line in reversed(metrics) if line["step"] == furthest)
        # A script need not say with every step how many there are.
        summary.steps = next((line["steps"] for line in reversed(metrics) if "steps" in line), summary.steps)
        if not summary.ended:
            summary.step = max(summary.step, furthest)
    return summary
