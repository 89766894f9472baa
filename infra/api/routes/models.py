"""Paths about published models."""

from enum import Enum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict

from cluster.models.registry import Registry
from infra.api.control import Control
from infra.api.door import Door
from infra.api.errors import CHANGE_ERRORS, READ_ERRORS
from infra.api.roles import ApiCaller


class Promotion(BaseModel):
    """Which version an alias is to name."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    version: str
    """A version's number, or what names one: `latest`, another alias."""


def add(router: APIRouter, control: Control, door: Door) -> None:
    """Add them."""
    reader = Annotated[ApiCaller, Depends(door.needs("read"))]
    runner = Annotated[ApiCaller, Depends(door.needs("run"))]
    tags: list[str | Enum] = ["models"]

    @router.get("/models", responses=READ_ERRORS, tags=tags)
    def list_all(caller: reader) -> dict[str, Any]:
        """Every version of every published model, as `shoal models --json` prints them, and where they
        are."""
        versions = [version.as_json() for version in Registry(control.storage).list()]
        return {"models": versions, "storage": control.storage.location}

    @router.put("/models/{name}/aliases/{alias}", responses=CHANGE_ERRORS, tags=tags)
    def promote_model(
        caller: runner, request: Request, name: str, alias: str, wanted: Promotion
    ) -> dict[str, Any]:
        """Let NAME@ALIAS name a version from now on: its row, and the version that it named `before`."""
        reference = f"{name}@{wanted.version}" if wanted.version else name
        with door.change(caller, request, f"{name}@{alias} = {reference}"):
            registry = Registry(control.storage)
            before = registry.aliases(name).get(alias)
            return {**registry.promote(reference, alias).as_json(), "before": before}
