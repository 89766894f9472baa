"""Errors of the control API: one shape, and which HTTP status stands for what."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from ray.exceptions import RayError
from starlette.exceptions import HTTPException

from cluster.errors import ConfigError, RequestError, ShoalError
from cluster.wording import first_line
from infra.api.packages import UnknownPackageError

ErrorKind = Literal["config", "request", "package", "token", "role", "missing", "cluster", "server"]
"""config: what was submitted has mistakes. request: the request was wrong. package: send the package first.
token: none, or an unknown one. role: not for this token's role. missing: no such path or method. cluster: it
cannot be done now. server: a fault of Shoal's."""


class MistakeModel(BaseModel):
    """One thing that is wrong in what was submitted."""

    file: str
    line: int | None
    column: int | None
    path: str
    given: Any
    message: str


class ErrorModel(BaseModel):
    """Why a request was not carried out."""

    kind: ErrorKind
    message: str
    mistakes: list[MistakeModel] = []


class ErrorDocument(BaseModel):
    """What every answer of a status from 400 on holds."""

    error: ErrorModel


class DeniedError(Exception):
    """The request carries no token that counts, or one of a lesser role."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        self.kind: ErrorKind = kind
        super().__init__(message)


_STATUS: dict[ErrorKind, int] = {
    "config": HTTPStatus.UNPROCESSABLE_ENTITY,
    "request": HTTPStatus.BAD_REQUEST,
    "package": HTTPStatus.CONFLICT,
    "token": HTTPStatus.UNAUTHORIZED,
    "role": HTTPStatus.FORBIDDEN,
    "cluster": HTTPStatus.SERVICE_UNAVAILABLE,
    "server": HTTPStatus.INTERNAL_SERVER_ERROR,
}
READ_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorDocument} for status in (400, 401, 403, 422, 503)
}
STREAM_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": "It could not begin.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorDocument"}}},
    }
    for status in READ_ERRORS
}
CHANGE_ERRORS: dict[int | str, dict[str, Any]] = {**READ_ERRORS, 409: {"model": ErrorDocument}}
"""For the API's own document."""


def answer(
    kind: ErrorKind, message: str, mistakes: list[dict[str, Any]] | None = None, status: int = 0
) -> JSONResponse:
    """An error as it is sent."""
    document = {"error": {"kind": kind, "message": message, "mistakes": mistakes or []}}
    headers = {"WWW-Authenticate": "Bearer"} if kind == "token" else None
    return JSONResponse(document, status or int(_STATUS[kind]), headers)


def add_handlers(api: FastAPI) -> None:
    """Let every error have that shape."""

    @api.exception_handler(ConfigError)
    async def of_config(request: Request, error: ConfigError) -> JSONResponse:
        return answer("config", str(error), [mistake.as_json() for mistake in error.mistakes])

    @api.exception_handler(UnknownPackageError)
    async def of_package(request: Request, error: UnknownPackageError) -> JSONResponse:
        return answer("package", str(error))

    @api.exception_handler(RequestError)
    async def of_request(request: Request, error: RequestError) -> JSONResponse:
        return answer("request", str(error))

    @api.exception_handler(ShoalError)
    async def of_cluster(request: Request, error: ShoalError) -> JSONResponse:
        return answer("cluster", str(error))

    @api.exception_handler(RayError)
    async def of_ray(request: Request, error: RayError) -> JSONResponse:
        return answer("cluster", f"Ray does not answer: {first_line(str(error)) or type(error).__name__}")

    @api.exception_handler(Exception)
    async def of_ours(request: Request, error: Exception) -> JSONResponse:
        where = "the actor shoal-api on the head has printed its traceback"
        return answer("server", f"a fault of Shoal's own ({type(error).__name__}); {where}")

    @api.exception_handler(DeniedError)
    async def of_access(request: Request, error: DeniedError) -> JSONResponse:
        return answer(error.kind, str(error))

    @api.exception_handler(RequestValidationError)
    async def of_schema(request: Request, error: RequestValidationError) -> JSONResponse:
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        return answer("request", "; ".join(found), status=HTTPStatus.UNPROCESSABLE_ENTITY)

    @api.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        said = answer(
            "missing", f"{request.method} {request.url.path}: {error.detail}", status=error.status_code
        )
        said.headers.update(error.headers or {})
        return said
