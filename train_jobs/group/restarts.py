"""Workers that stay: ranks that failed, or have left, are followed by others under the same workers.

A worker whose rank has failed, or left, reports it and waits for the verdict: the next attempt or group,
whose rank it starts, or nothing, so that it ends as well. Between them and the driver stands the actor of
each node that has the fork server (train_jobs.group.job_agents).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from train_jobs.errors import RankError
from train_jobs.spec import GroupSpec

LEFT: Literal["left"] = "left"
"""The report of a rank that has left."""
RankReport = RankError | Literal["left"]


@dataclass
class _GroupReports:
    reports: list[RankReport] = field(default_factory=list)
    reported: asyncio.Condition = field(default_factory=asyncio.Condition)
    verdict: asyncio.Future[GroupSpec | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Restarts:
    """What the ranks of one node report, and what becomes of them; by the names of their groups."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupReports] = {}

    async def report(self, group: str, report: RankReport) -> GroupSpec | None:
        """Report how a rank ended; returns what its worker does next, None where that is to end too."""
        of = self._of(group)
        async with of.reported:
            of.reports.append(report)
            of.reported.notify_all()
        return await asyncio.shield(of.verdict)

    async def reports(self, group: str, more_than: int) -> Sequence[RankReport]:
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
