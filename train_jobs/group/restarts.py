"""Restarts in place: ranks that failed start again under the workers that they have.

A worker whose rank has failed reports it and waits for the verdict: the next attempt, whose rank it starts,
or nothing, so that it fails as well and its group ends. Between them and the driver stands the actor of each
node that has the fork server (train_jobs.group.job_agents).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from train_jobs.errors import RankError
from train_jobs.spec import GroupSpec


@dataclass
class _GroupReports:
    reports: list[RankError] = field(default_factory=list)
    reported: asyncio.Condition = field(default_factory=asyncio.Condition)
    verdict: asyncio.Future[GroupSpec | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Restarts:
    """What the ranks of one node report, and what becomes of them; by the names of their groups."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupReports] = {}

    async def report(self, group: str, error: RankError) -> GroupSpec | None:
        """Report how a rank failed; returns what its worker does next, None where that is to fail too."""
        of = self._of(group)
        async with of.reported:
            of.reports.append(error)
            of.reported.notify_all()
        return await asyncio.shield(of.verdict)

    async def reports(self, group: str, more_than: int) -> Sequence[RankError]:
        """Wait until more ranks than so many have reported; all of their reports."""
        of = self._of(group)
        async with of.reported:
            await of.reported.wait_for(lambda: len(of.reports) > more_than)
        return of.reports

    def decide(self, group: str, following: GroupSpec | None) -> None:
        """Tell all workers of a group what comes next; those that report later hear it too."""
        verdict = self._of(group).verdict
        if not verdict.done():
            verdict.set_result(following)

    def _of(self, group: str) -> _GroupReports:
        return self._groups.setdefault(group, _GroupReports())
