"""Paths for those who look after a cluster: tokens, keys of the gateway, and the audit log."""

from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from infra.api.control import Control
from infra.api.door import Door
from infra.api.errors import CHANGE_ERRORS, READ_ERRORS
from infra.api.gateway_keys import add_key
from infra.api.roles import ApiCaller, Role
from infra.api.tokens import NAME

MOST_ENTRIES = 10_000


class TokenRequest(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    name: str = Field(pattern=f"^{NAME.pattern}$")
    """Whose it is, as the audit log will name them."""
    role: Role
    """What it opens."""
    days: float | None = Field(default=None, gt=0, le=36_500)
    """How long it is valid. Default: until it is revoked."""


class KeyRequest(BaseModel):
    """An API key of the gateway to make."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    tenant: str = Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9._-]+$")
    """Who it is for."""
    apps: list[str] | None = None
    """Apps that it opens. Default: all."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers together."""
    metrics: bool = False
    """Whether it opens /metrics and /load too, which tell of all apps."""


def add(router: APIRouter, control: Control, door: Door) -> None:
    """Add them."""
    admin = Annotated[ApiCaller, Depends(door.needs("admin"))]
    tags: list[str | Enum] = ["admin"]

    @router.get("/tokens", responses=READ_ERRORS, tags=tags)
    def list_tokens(caller: admin) -> list[dict[str, Any]]:
        """Whose tokens there are, and what they open."""
        return [entry.as_json() for entry in control.tokens.entries()]

    @router.post("/tokens", status_code=201, responses=CHANGE_ERRORS, tags=tags)
    def make_token(caller: admin, request: Request, wanted: TokenRequest) -> dict[str, Any]:
        """Make a token; it is shown this once."""
        until = None if wanted.days is None else datetime.now(UTC) + timedelta(days=wanted.days)
        with door.change(caller, request, f"{wanted.name} ({wanted.role})"):
            token = control.tokens.make(wanted.name, wanted.role, caller.name, until)
        return {"token": token, "name": wanted.name, "role": wanted.role}

    @router.delete("/tokens/{name}", responses=CHANGE_ERRORS, tags=tags)
    def revoke_token(caller: admin, request: Request, name: str) -> dict[str, Any]:
        """Take a token back; what was begun with it goes on."""
        with door.change(caller, request, name):
            control.tokens.revoke(name)
        return {"revoked": name}

    @router.post("/keys", status_code=201, responses=CHANGE_ERRORS, tags=tags)
    def make_key(caller: admin, request: Request, wanted: KeyRequest) -> dict[str, Any]:
        """Make an API key of the gateway and add it to the key file on the head; it is shown this once."""
        with door.change(caller, request, wanted.tenant):
            secret = add_key(control.keys, wanted.model_dump())
        return {"key": secret, "tenant": wanted.tenant, "file": control.keys}

    @router.get("/audit", responses=READ_ERRORS, tags=tags)
    def read_audit(
        caller: admin, most: Annotated[int, Query(ge=1, le=MOST_ENTRIES)] = 100
    ) -> list[dict[str, Any]]:
        """The last lines of the audit log, the oldest of them first."""
        return control.audit.newest(most)
