"""The control API's own document is true: schemathesis sends what it allows and what it forbids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from infra.api import PREFIX
from infra.api.access import digest_of, new_token
from infra.api.app import build_api
from infra.app_logs import AppLogs
from tests.fuzzing import fuzz
from tests.served_api import RayJobs, control, served
from tests.train_jobs.ranks import tiny_job
from train_jobs.driver.submission import record_submission
from train_jobs.records.run_log import RunLog, now

JOB = "lm-20260101-000000-abcd"
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
]
"""All of schemathesis but those for which what was created would have to be there and usable."""
ENDLESS = f"{PREFIX}/events/stream"


def fuzzed(folder: Path, examples: int) -> None:
    """Fuzz the API of a cluster whose Ray does not answer, with one job that has ended."""
    storage, jobs = Storage(folder / "storage"), RayJobs()

    def end(storage: Storage, job: str) -> None:
        """Every job ends at once, and with it its stream."""
        log = RunLog(storage.child("jobs", job))
        log.event(now(), "finished", status="failed", step=0, exit_code=1)
        log.close()

    jobs.then = end
    record_submission(storage, JOB, "lm", tiny_job(folder / "c.parquet"), JOB)
    end(storage, JOB)
    lab, token = control(storage, jobs), new_token()
    lab.tokens.trust(digest_of(token))
    headers = {"Authorization": f"Bearer {token}"}
    with served(lab) as port:
        url = f"http://127.0.0.1:{port}"
        schema: dict[str, Any] = httpx.get(f"{url}{PREFIX}/openapi.json", timeout=20).json()
        del schema["paths"][ENDLESS]
        known = {"job": [JOB, "lm"], "name": ["chat"]}
        for path in schema["paths"].values():
            for operation in path.values():
                for one in operation.get("parameters", ()):
                    if one["in"] == "path" and one["name"] in known:
                        one["schema"]["examples"] = known[one["name"]]
        fuzz(
            folder, url, schema, examples, [each for each in CHECKS if each != "not_a_server_error"], headers
        )
    asked = {(line["operation"], line["outcome"]) for line in lab.audit.newest(10_000)}
    assert {("submit_job", "done"), ("resume_job", "done"), ("make_token", "done")} <= asked


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_answer_is_undocumented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: AppLogs) -> list[str]:
        raise ShoalError("Ray does not say which processes there are or were")

    monkeypatch.setattr(AppLogs, "apps", away)  # Ray's client tries for seconds
    fuzzed(tmp_path, examples=100)


def test_every_operation_has_a_name_of_its_own_and_says_what_it_does(tmp_path: Path) -> None:
    schema = build_api(control(Storage(tmp_path))).openapi()
    operations = [one for path in schema["paths"].values() for one in path.values()]
    assert all(one["description"] for one in operations)
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
