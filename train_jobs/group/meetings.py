"""Where the ranks of a group learn of the store by which they find one another."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class _Meeting:
    address: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    told: int = 0


class Meetings:
    """The meetings of groups, by their names; what all ranks have heard is forgotten."""

    def __init__(self) -> None:
        self._of: dict[str, _Meeting] = {}

    async def meet(self, group: str, address: str | None, rank_count: int) -> str:
        """Wait for the address that rank 0 of a group names; each of its ranks asks once.

        Args:
            address: host:port of the store, from rank 0; None from the others.
            rank_count: of the group.
        """
        meeting = self._of.setdefault(group, _Meeting())
        if address is not None and not meeting.address.done():
            meeting.address.set_result(address)
        found = await asyncio.shield(meeting.address)
        meeting.told += 1
        if meeting.told >= rank_count:
            self._of.pop(group, None)
        return found
