"""Which nodes fail jobs again and again, and for how long nothing starts there: pure logic.

Jobs report failures that speak against a node: it went away, its accelerator is broken, or ranks on it ended
or met an error of its file system or network while those on other nodes did not. A mistake in the program
that is trained must not count, and it can look like that (a crash in native code on rank 0). So:

- exceptions of the program, a lack of memory and hangs are not reported at all;
- failures of one job at one step are one failure: what comes back at the same step is most likely the
  program's;
- a job whose ranks failed on two nodes within the window says nothing about either: the failure follows the
  job. That holds afterwards too: a node is trusted again as soon as the job that blamed it fails elsewhere;
- what one job says is enough only if it had ranks on other nodes, which did not fail;
- a node whose accelerator ended a kernel is avoided at once: the job that says so is tried elsewhere, and
  where it fails there too, the node is trusted again.

What happens to several jobs in the same moment is one failure, and a node that is lost is lost once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal

from cluster.sharing.events import Event, listed
from cluster.wording import counted

FAILURES = 3
WINDOW_S = 3600.0
"""Failures within this time count together."""
FIRST_S = 600.0
"""How long a node is avoided at first; twice as long each further time."""
MOST_S = 86_400.0
"""The longest; and after so long without failures the next time counts as the first again."""
MEMORY_S = 2 * MOST_S
"""What was said of a node counts no more when nothing was said of it for so long: it is not avoided, and its
next time is the first."""
SAME_MOMENT_S = 5.0
"""Failures on one node within so many seconds are one failure."""
_MOST_REPORTS = 2000

Against = Literal["node", "device", "worker", "transient"]
"""The classes of failure that can speak against a node."""


@dataclass(frozen=True)
class Report:
    """A failure that speaks against a node.

    Attributes:
        node: its name, which outlives a restart of its machine.
        holder: whose failure it was.
        against: class of the failure; "node": it was lost, or its accelerator is broken; "device": its
            accelerator ended a kernel.
        step: steps that the job had done.
        elsewhere: the job had ranks on other nodes, and they did not fail.
        lost: Ray's id of a node that was lost; each is lost once, whoever reports it.
        time: seconds since the epoch.
    """

    node: str
    holder: str
    against: Against
    step: int
    elsewhere: bool
    time: float
    lost: str | None = None

    @property
    def incident(self) -> tuple[object, ...]:
        """Reports of the same incident count once."""
        if self.against == "node":
            return ("lost", self.lost) if self.lost else ("broken", self.holder, self.time)
        return (self.holder, self.step)


_FACTS = tuple(each.name for each in fields(Report))


@dataclass(frozen=True)
class Avoidance:
    """That a node is avoided, and why; times are seconds since the epoch.

    Attributes:
        times: how often it has been, this time included.
    """

    node: str
    since: float
    until: float
    times: int
    reason: str

    def as_json(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "since": _utc(self.since),
            "until": _utc(self.until),
            "times": self.times,
        }


@dataclass(frozen=True)
class _NodeFailure:
    """What counts as one failure of a node.

    Attributes:
        holders: whose jobs it hit.
        alone: of a job that had ranks elsewhere, which did not fail.
        of_kernel: an accelerator ended a kernel.
    """

    time: float
    holders: frozenset[str]
    alone: bool
    of_kernel: bool = False


class NodeHealth:
    """The reports, and what follows from them.

    Times are passed in: seconds since the epoch, so that what was written down is understood after a restart.

    Args:
        failures: so many within WINDOW_S, and a node is avoided; 0: none ever is.
    """

    def __init__(self, failures: int = FAILURES) -> None:
        self.failures = failures
        self._reports: list[Report] = []
        self._forgiven: dict[str, float] = {}
        self._known: dict[str, Avoidance] = {}
        """What has been told as avoided."""
        self._verdicts: dict[str, Avoidance] | None = {}

    def report(self, report: Report) -> Event:
        """Take in a failure; returns the event that says so."""
        self._reports = [*self._reports, report][-_MOST_REPORTS:]
        self._verdicts = None
        what = {
            "node": "lost {} or an accelerator of it",
            "device": "had a kernel ended by an accelerator of {}",
            "worker": "lost a worker on {}",
        }
        words = what.get(report.against, "met an error on {} that may pass").format(report.node)
        reason = f"{report.holder} {words}, at step {report.step}"
        return Event("node_blamed", reason, node=report.node, facts=asdict(report))

    def forgive(self, node: str, now: float) -> Event:
        """Forget all that speaks against a node; returns the event that says so."""
        self._forgiven[node] = now
        self._verdicts = None
        self._known.pop(node, None)
        facts = {"forgiven": True, "time": now}
        return Event("node_trusted", f"{node} is trusted again: it was forgiven", node=node, facts=facts)

    def recall(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in what the log of a former self tells; what another version wrote otherwise is left out."""
        for event in events:
            facts = event.get("facts", {})
            if event["cause"] == "node_blamed" and all(name in facts for name in _FACTS):
                self._reports.append(Report(**{name: facts[name] for name in _FACTS}))
            elif event["cause"] == "node_trusted" and facts.get("forgiven"):
                self._forgiven[event["node"]] = float(facts["time"])
        self._verdicts = None

    def avoided(self, now: float) -> dict[str, Avoidance]:
        """The nodes that are avoided now, by name."""
        if self._verdicts is None:
            newest = {each.node: each.time for each in sorted(self._reports, key=lambda each: each.time)}
            names = sorted(name for name, time in newest.items() if now - time <= MEMORY_S)
            self._reports = [each for each in self._reports if each.node in names]
            found = {name: self._judge(name) for name in names}
            self._verdicts = {name: verdict for name, verdict in found.items() if verdict is not None}
        return {name: verdict for name, verdict in self._verdicts.items() if now < verdict.until}

    def changes(self, now: float) -> list[Event]:
        """What is to be told since the last call: nodes that are avoided now, and that no longer are."""
        current, events = self.avoided(now), []
        for name, verdict in current.items():
            if self._known.get(name) != verdict:
                reason = f"{name} is avoided until {_utc(verdict.until)}: {verdict.reason}"
                events.append(Event("node_avoided", reason, node=name, facts=verdict.as_json()))
        for name, verdict in self._known.items():
            if name not in current:
                why = "its time is over" if now >= verdict.until else "who blamed it fails elsewhere too"
                facts = {"forgiven": False, "time": now}
                events.append(
                    Event("node_trusted", f"{name} is trusted again: {why}", node=name, facts=facts)
                )
        self._known = current
        return events

    def _judge(self, node: str) -> Avoidance | None:
        """The last time that a node was found to fail jobs."""
        verdict: Avoidance | None = None
        counting: list[_NodeFailure] = []
        for failure in self._failures_of(node):
            now = failure.time
            counting = [*(each for each in counting if now - each.time <= WINDOW_S), failure]
            if not self._enough(counting):
                continue
            again = verdict is not None and now - verdict.until <= MOST_S
            times = verdict.times + 1 if verdict is not None and again else 1
            lasts_s = min(MOST_S, FIRST_S * 2 ** min(times - 1, 30))
            verdict = Avoidance(node, now, now + lasts_s, times, _reason(counting))
            counting = []
        return verdict

    def _enough(self, failures: Sequence[_NodeFailure]) -> bool:
        if self.failures and failures[-1].of_kernel:
            return True
        if not 0 < self.failures <= len(failures):
            return False
        return len(_holders(failures)) > 1 or all(each.alone for each in failures)

    def _failures_of(self, node: str) -> list[_NodeFailure]:
        """The failures of a node that count, in order of time."""
        forgiven = self._forgiven.get(node, 0.0)
        found: list[_NodeFailure] = []
        seen = set()
        for report in sorted(self._reports, key=lambda each: each.time):
            if report.node != node or report.time <= forgiven or report.incident in seen:
                continue
            if report.against != "node" and self._fails_elsewhere(report):
                continue
            seen.add(report.incident)
            alone, of_kernel = report.elsewhere or report.against == "node", report.against == "device"
            if found and report.time - found[-1].time < SAME_MOMENT_S:
                last = found[-1]
                holders, alone = last.holders | {report.holder}, last.alone or alone
                found[-1] = _NodeFailure(last.time, holders, alone, last.of_kernel or of_kernel)
            else:
                found.append(_NodeFailure(report.time, frozenset({report.holder}), alone, of_kernel))
        return found

    def _fails_elsewhere(self, report: Report) -> bool:
        return any(
            other.holder == report.holder
            and other.node != report.node
            and other.against != "node"
            and abs(other.time - report.time) <= WINDOW_S
            for other in self._reports
        )


def remembered(events: Iterable[Mapping[str, Any]], now: float) -> Iterator[Mapping[str, Any]]:
    """Of events, the newest first, those that `recall` needs: no more of them are taken than that.

    They reach back to the cluster's start; or to MEMORY_S before the first report of those that count, which
    are those of a node that follow on one another, and are followed by now, without a pause of MEMORY_S.
    """
    first: dict[str, float] = {}
    """By node, the first report that counts."""
    reports = 0
    for event in events:
        facts = event.get("facts", {})
        if event["cause"] == "broker_started" and not facts.get("restarted", True):
            return
        if "time" not in facts:
            continue
        time = float(facts["time"])
        if min((now, *first.values())) - time > MEMORY_S or reports == _MOST_REPORTS:
            return
        if event["cause"] == "node_blamed":
            reports += 1
            if first.get(event["node"], now) - time <= MEMORY_S:
                first[event["node"]] = time
        yield event


def _holders(failures: Sequence[_NodeFailure]) -> frozenset[str]:
    return frozenset[str]().union(*(each.holders for each in failures))


def _reason(failures: Sequence[_NodeFailure]) -> str:
    whose = listed(sorted(_holders(failures)), most=3)
    within = max(1, round((failures[-1].time - failures[0].time) / 60))
    return f"{counted(len(failures), 'failure')} of {whose} within {counted(within, 'minute')}"


def _utc(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")
