"""Who may do what through the control API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["read", "run", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do what those before it may.

read: see all there is, logs too. run: submit and stop jobs, serve and take down apps, name models. admin:
tokens, the audit log, trust in nodes. Whoever may run a job runs programs as the cluster's user.
"""


@dataclass(frozen=True)
class ApiCaller:
    """Who asks, and what they may do."""

    name: str
    role: Role

    def may(self, needed: Role) -> bool:
        """Whether this caller's role is the needed one or a greater one."""
        return ROLES.index(self.role) >= ROLES.index(needed)
