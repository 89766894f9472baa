"""How many failures of each class a job survives, and how long it waits before it tries again: pure logic."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cluster.config.sections.train import RecoveryConfig
from train_jobs.driver.failures import Failure, FailureClass

BACKOFF_MOST_S = 30.0


@dataclass(frozen=True)
class _Rule:
    """What is done about a class of failures.

    Attributes:
        key: of `recovery`: how often in a row.
        failures: what they are called when there are several.
        first_s: the most that is waited before the first attempt after one; it doubles from then on.
    """

    key: str
    failures: str
    first_s: float = 0.0


_RULES = {
    # A lost process, and most often a lost node, is replaced at once: nothing is gained by waiting.
    FailureClass.WORKER: _Rule("worker_failures", "lost workers"),
    FailureClass.NODE: _Rule("node_failures", "lost nodes"),
    FailureClass.DEVICE: _Rule("node_failures", "kernels that accelerators ended"),
    FailureClass.HANG: _Rule("hangs", "hangs"),
    FailureClass.MEMORY: _Rule("memory_failures", "failures for lack of memory"),
    # What others have, or do not answer with, takes its time to come back.
    FailureClass.START: _Rule("start_failures", "failures to start", first_s=2.0),
    FailureClass.TRANSIENT: _Rule("transient_errors", "errors that may pass", first_s=2.0),
}
_ONLY_BY_STEPS = (FailureClass.MEMORY, FailureClass.DEVICE)
"""Whose counts begin anew with a step, and not with what a script saves."""
_ANY_EXCEPTION = _Rule("worker_failures", "exceptions")
_AT_ONCE = {
    FailureClass.CODE: "it would be raised again, so the job ends",
    FailureClass.CHECKPOINT: "another attempt finds the same, so the job ends",
    FailureClass.LOSS: "another attempt computes the same, so the job ends",
    FailureClass.REQUEST: "another attempt cannot mend it",
}


@dataclass(frozen=True)
class Decision:
    """Try again after `backoff_s` seconds, or give up for `reason`."""

    again: bool
    backoff_s: float = 0.0
    reason: str = ""


class FailureBudget:
    """Counts the failures of one job and decides about the next attempt.

    Each class has a budget of its own: how many failures of it may come in a row. All begin anew whenever
    the job got further than ever before: did a step more or, as a script, saved something. (What a script
    saves may be the same each time. A lack of memory, or a kernel that is the program's mistake, would then
    come for ever: of those only steps count.)

    An exception of the user's code ends the job at once, unless the job says that any is to be tried again;
    so do a loss that is no number and a request that cannot be met. A kernel that an accelerator ended is
    tried once more, elsewhere where that can be: if it comes back at the same step, and nothing was saved in
    between, it is the program's. (The steps of a script that prints none are not known: only its saves tell.)

    A replica group that fails again and again before it takes part, while others step, never ends the job:
    they do not miss it. It only waits longer each time.

    The wait before another attempt doubles with every failure of its class, to 30 s, and a part of it, up
    to a half, is left out at random: what made one job fail (a node, a switch, the storage) most often made
    others fail in the same second, and they should not all come back in the same second too (equal jitter;
    M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015). The generator is seeded, so
    that a job waits the same in every run.

    Args:
        seed: another for every job.
    """

    def __init__(self, recovery: RecoveryConfig, seed: str) -> None:
        self.recovery = recovery
        self._random = random.Random(seed)
        self._furthest = -1
        self._saves = 0
        self._in_a_row: dict[FailureClass, int] = {}
        self._ended_kernel_at: tuple[int, int] | None = None
        """The step of the last failure of a kernel, and how often a script had saved by then."""

    def decide(self, failure: Failure, step: int, in_vain: int = 0, saves: int = 0) -> Decision:
        """Judge a failure that came when the job had done `step` steps.

        Args:
            in_vain: how often in a row a group has now failed before it took part, while others go on.
            saves: how often a script has saved something.
        """
        failure_class = failure.failure_class
        any_exception = failure_class is FailureClass.CODE and self.recovery.retry == "any"
        if failure_class in _AT_ONCE and not any_exception:
            return Decision(False, reason=_AT_ONCE[failure_class])
        if step > self._furthest:
            self._furthest = step
            self._in_a_row.clear()
        elif saves > self._saves:
            self._in_a_row = {each: self._in_a_row.get(each, 0) for each in _ONLY_BY_STEPS}
        self._saves = max(saves, self._saves)
        if failure_class is FailureClass.DEVICE:
            before, self._ended_kernel_at = self._ended_kernel_at, (step, self._saves)
            if before == self._ended_kernel_at:
                return Decision(False, reason="it came back at the same step, so it is the program's")
        rule = _ANY_EXCEPTION if any_exception else _RULES[failure_class]
        allowed = getattr(self.recovery, rule.key)
        if in_vain and allowed:
            return Decision(True, self._backoff_s(rule, in_vain))
        count = self._in_a_row[failure_class] = self._in_a_row.get(failure_class, 0) + 1
        if count > allowed:
            return Decision(
                False,
                reason=f"{failure_class}: {count} {rule.failures} in a row without a step beyond {step}; "
                f"recovery.{rule.key} allows {allowed}",
            )
        return Decision(True, self._backoff_s(rule, count))

    def _backoff_s(self, rule: _Rule, count: int) -> float:
        doublings = min(count - 1, 10)
        if rule.first_s:
            most = rule.first_s * 2**doublings
        else:
            most = 0.0 if count == 1 else 2.0 ** (doublings - 1)
        return min(BACKOFF_MOST_S, most) * (1 - self._random.random() / 2)
