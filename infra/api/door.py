"""Who may come in to the control API, and what is noted of each change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from infra.api.audit import Change
from infra.api.control import Control
from infra.api.errors import DeniedError
from infra.api.roles import ApiCaller, Role

_BEARER = HTTPBearer(
    auto_error=False, description="A token of `shoal token`, or that of whoever called `shoal up`."
)


class Door:
    """Who may come in, and the book in which changes are written."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def needs(self, role: Role) -> Callable[..., ApiCaller]:
        """A dependency: the caller, who has this role or a greater one."""

        def caller(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> ApiCaller:
            if given is None:
                raise DeniedError("token", "a token is needed: Authorization: Bearer …")
            found = self._control.tokens.caller_of(given.credentials)
            if found is None:
                raise DeniedError("token", "this token is unknown here, or has expired or been revoked")
            if not found.may(role):
                raise DeniedError("role", f"{found.name} may {found.role}; this needs the role {role}")
            return found

        return caller

    @contextmanager
    def change(self, caller: ApiCaller, request: Request, target: str) -> Iterator[Change]:
        """Note a change in the audit log."""
        address = request.client.host if request.client else ""
        operation = getattr(request.scope.get("route"), "name", request.url.path)
        with self._control.audit.change(caller, address, operation, target) as change:
            yield change
