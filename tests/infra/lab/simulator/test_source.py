"""Published traces are read as they were published, and a source is what its first line says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import RequestError
from infra.lab.simulator.generator import Recipe
from infra.lab.simulator.jobs import Job
from infra.lab.simulator.source import trace_of

RIGID = Recipe(elastic=0.0)
PODS = "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\n"


def attempt(start: str | None, end: str | None, *gpus: int) -> dict[str, Any]:
    """One attempt in the form of the published schema, on a node for each number of GPUs."""
    detail = [
        {"ip": f"m{node}", "gpus": [f"gpu{gpu}" for gpu in range(count)]} for node, count in enumerate(gpus)
    ]
    return {"start_time": start, "end_time": end, "detail": detail}


def entry(name: str, submitted: str, *attempts: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": "Pass",
        "vc": "v1",
        "jobid": name,
        "attempts": list(attempts),
        "submitted_time": submitted,
        "user": "u1",
    }


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace"
    path.write_text(text)
    return str(path)


def test_a_job_log_of_philly_gives_size_submission_and_the_time_that_ran(tmp_path: Path) -> None:
    log = [
        entry(
            "second",
            "2017-10-07 01:11:39",
            attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23", 8, 4),
            attempt("2017-10-07 02:00:00", "2017-10-08 02:00:10", 8, 4),
        ),
        entry("first", "2017-10-07 01:11:09", attempt("2017-10-07 01:12:00", "2017-10-07 01:12:30", 1)),
        entry("never", "2017-10-07 01:00:00"),
        entry("open", "2017-10-07 01:00:00", attempt("2017-10-07 01:12:00", None, 2)),
    ]
    trace = trace_of(written(tmp_path, json.dumps(log)), RIGID)
    assert trace.jobs == (
        Job("first", 0, 30, group=1, user="v1"),
        Job("second", 30, 74 + 86_410, group=12, user="v1"),
    )
    assert trace.left_out == (
        "1 job left out: no device was recorded",
        "1 job left out: no start and end of a run was recorded",
    )


def test_a_list_of_pods_of_alibaba_gives_size_submission_and_the_time_that_ran(tmp_path: Path) -> None:
    text = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,"
        "scheduled_time\n"
        "a,8000,100,8,1000,,LS,Succeeded,1000,1700,1100\n"
        "b,8000,100,1,220,V100M16|V100M32,BE,Running,1300,1500,1300.0\n"
        "c,8000,100,0,0,,LS,Running,900,1500,1300\n"
        "d,8000,100,1,1000,,LS,Pending,900,1500,\n"
    )
    trace = trace_of(written(tmp_path, text), RIGID)
    assert trace.jobs == (Job("a", 0, 600, group=8), Job("b", 300, 200, group=1))
    assert set(trace.left_out) == {
        "1 job given a whole GPU though they asked for a share",
        "1 job left out: they ask for no GPU",
        "1 job left out: no start and end of a run was recorded",
    }


def test_jobs_of_a_published_trace_are_made_elastic_around_what_they_asked_for(tmp_path: Path) -> None:
    log = [entry("a", "2017-10-07 01:00:00", attempt("2017-10-07 01:12:00", "2017-10-07 01:13:00", 8, 4))]
    (job,) = trace_of(written(tmp_path, json.dumps(log)), Recipe(elastic=1.0)).jobs
    assert (job.devices, job.group * job.min_groups, job.group * job.max_groups) == (12, 6, 24)


def test_a_csv_keeps_what_it_says_of_elasticity(tmp_path: Path) -> None:
    text = "job,submit_s,duration_s,devices\r\na,0,1,8\r\n"
    assert trace_of(written(tmp_path, text), Recipe(elastic=1.0)).jobs == (Job("a", 0, 1, group=8),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[{]", "is no job log of Philly"),
        ("{}", "should be a list of jobs"),
        ('[{"jobid": "a"}]', "job 1 of the log has no readable 'submitted_time'"),
        (json.dumps([entry("a", "yesterday")]), "job 1 of the log has no readable"),
        (json.dumps([entry("a", "2017-10-07 01:00:00")]), "holds no job that ran"),
        ("name,num_gpu,creation_time\na,1,5\n", ":2: no readable 'gpu_milli'"),
        (
            "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\na,1,5,x,1,1\n",
            ":2: no readable",
        ),
        ("name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\na,0,5,1,1,1\n", "holds no pod"),
    ],
)
def test_a_file_in_no_known_format_is_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        trace_of(written(tmp_path, text), RIGID)
    assert words in str(caught.value)


def test_what_is_neither_a_file_nor_a_generator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a file nor a generator; generators are philly"):
        trace_of("helios:3", RIGID)
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        trace_of(str(tmp_path / "none.csv"), RIGID)
    (tmp_path / "binary").write_bytes(b"job\xff")
    with pytest.raises(RequestError, match="is no text in UTF-8: byte 4 is not"):
        trace_of(str(tmp_path / "binary"), RIGID)
