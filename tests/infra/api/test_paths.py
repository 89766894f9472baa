"""The paths of the control API: who may use which, what is noted, and the shape of what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from infra.api import PREFIX
from infra.api.access import digest_of, new_token
from infra.api.app import build_api
from infra.api.control import Control
from infra.api.roles import ROLES, Role
from tests.served_api import RayJobs, control, served

READ = {
    "/version",
    "/cluster",
    "/nodes",
    "/nodes/x/logs",
    "/leases",
    "/explain/x",
    "/events",
    "/events/stream",
    "/jobs",
    "/apps",
}
READ |= {
    "/jobs/x",
    "/jobs/x/checkpoints",
    "/jobs/x/stream",
    "/logs/x",
    "/models",
    "/apps/x/rollouts/1/stream",
}
NEEDS: dict[tuple[str, str], Role] = {
    **{("GET", path): "read" for path in READ},
    ("PUT", "/packages/x"): "run",
    ("POST", "/jobs"): "run",
    ("POST", "/jobs/x/stop"): "run",
    ("POST", "/jobs/x/export"): "run",
    ("POST", "/jobs/x/resume"): "run",
    ("PUT", "/apps/x"): "run",
    ("DELETE", "/apps/x"): "run",
    ("POST", "/apps/x/rollback"): "run",
    ("POST", "/apps/x/batch"): "run",
    ("PUT", "/models/x/aliases/x"): "run",
    ("POST", "/nodes/x/forgive"): "admin",
    ("GET", "/tokens"): "admin",
    ("POST", "/tokens"): "admin",
    ("POST", "/keys"): "admin",
    ("DELETE", "/tokens/x"): "admin",
    ("GET", "/audit"): "admin",
}
"""What each needs, as the table of the page has it."""


def operations(api: Any) -> set[tuple[str, str]]:
    found = set()
    for path, methods in api.openapi()["paths"].items():
        parts = [
            "1" if part == "{number}" else "x" if part.startswith("{") else part for part in path.split("/")
        ]
        found |= {(method.upper(), "/".join(parts).removeprefix(PREFIX)) for method in methods}
    return found


@pytest.fixture
def lab(tmp_path: Path) -> Control:
    return control(Storage(tmp_path / "storage"))


@pytest.fixture
def tokens(lab: Control) -> dict[str, str]:
    return {role: lab.tokens.make(role, role, "up") for role in ROLES}


@pytest.fixture
def client(lab: Control) -> Iterator[httpx.Client]:
    with served(lab) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}{PREFIX}") as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_every_path_is_in_the_table(lab: Control) -> None:
    assert operations(build_api(lab)) == set(NEEDS)


@pytest.mark.parametrize(("method", "path"), sorted(NEEDS))
def test_nobody_comes_in_without_the_role(
    method: str, path: str, client: httpx.Client, tokens: dict[str, str], lab: Control
) -> None:
    needed = NEEDS[method, path]
    for headers in ({}, bearer("shoal-wrong"), {"Authorization": f"Basic {tokens['admin']}"}):
        answer = client.request(method, path, headers=headers, json={})
        assert answer.status_code == 401
        assert answer.json()["error"]["kind"] == "token"
        assert answer.headers["www-authenticate"] == "Bearer"
    for role in ROLES[: ROLES.index(needed)]:
        answer = client.request(method, path, headers=bearer(tokens[role]), json={})
        assert (answer.status_code, answer.json()["error"]["kind"]) == (403, "role")
        assert answer.json()["error"]["message"] == f"{role} may {role}; this needs the role {needed}"
    assert lab.audit.newest(10) == [], "who may not has changed nothing"


def test_what_is_changed_is_noted_and_what_is_only_seen_is_not(
    client: httpx.Client, tokens: dict[str, str], lab: Control
) -> None:
    headers = bearer(tokens["admin"])
    assert client.get("/tokens", headers=headers).status_code == 200
    made = client.post("/tokens", headers=headers, json={"name": "ann", "role": "read", "days": 1.5})
    assert made.status_code == 201
    assert client.get("/version", headers=bearer(made.json()["token"])).json()["caller"] == {
        "name": "ann",
        "role": "read",
    }
    assert client.delete("/tokens/ann", headers=headers).json() == {"revoked": "ann"}
    assert client.get("/version", headers=bearer(made.json()["token"])).status_code == 401
    assert client.delete("/tokens/ann", headers=headers).status_code == 400
    lines = client.get("/audit", headers=headers).json()
    assert [(line["who"], line["operation"], line["target"], line["outcome"]) for line in lines] == [
        ("admin", "make_token", "ann (read)", "asked"),
        ("admin", "make_token", "ann (read)", "done"),
        ("admin", "revoke_token", "ann", "asked"),
        ("admin", "revoke_token", "ann", "done"),
        ("admin", "revoke_token", "ann", "asked"),
        ("admin", "revoke_token", "ann", "refused"),
    ]
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    assert made.json()["token"] not in str(lines)


def test_every_error_has_one_shape(client: httpx.Client, tokens: dict[str, str]) -> None:
    headers = bearer(tokens["admin"])
    for answer, status, kind in (
        (client.get("/nothing", headers=headers), 404, "missing"),
        (client.patch("/jobs", headers=headers), 405, "missing"),
        (client.get("/jobs/lm", headers=headers), 400, "request"),
        (client.post("/jobs", headers=headers, content=b"{"), 422, "request"),
        (client.post("/jobs", headers=headers, json={"name": "a", "config": {"steps": -1}}), 422, "request"),
        (client.get("/events?after=1", headers=headers), 422, "request"),
        (client.get("/leases", headers=headers), 503, "cluster"),
    ):
        assert (answer.status_code, answer.json()["error"]["kind"]) == (status, kind), answer.text
        assert answer.json()["error"]["message"]
    assert client.get("http://127.0.0.1" + f":{client.base_url.port}/health").json() == {"status": "ok"}


def test_a_job_that_does_not_fit_is_refused_with_every_mistake_and_not_submitted(
    client: httpx.Client, tokens: dict[str, str]
) -> None:
    config = {"workers": {"min": 9, "max": 9, "cpus": 2}, "data": {"source": "/no/such/file.parquet"}}
    asked = {"name": "lm", "config": config}
    answer = client.post("/jobs", headers=bearer(tokens["run"]), json=asked)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (422, "config")
    paths = {mistake["path"] for mistake in answer.json()["error"]["mistakes"]}
    assert {"train_jobs.lm.workers.min", "train_jobs.lm.data.source"} <= paths
    assert client.get("/jobs", headers=bearer(tokens["read"])).json() == []


def test_where_ray_does_not_answer_that_is_said(tmp_path: Path) -> None:
    class Away(RayJobs):
        def statuses(self) -> dict[str, str]:
            raise ShoalError("the job API does not answer")

    lab = control(Storage(tmp_path / "storage"), Away())
    own = new_token()
    lab.tokens.trust(digest_of(own))
    with served(lab) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}{PREFIX}") as client:
        answer = client.get("/jobs", headers=bearer(own))
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the job API does not answer")
        status = client.get("/cluster", headers=bearer(own)).json()
        assert "the job API does not answer" in status["notes"]
        assert status["jobs"] == []
