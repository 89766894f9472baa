"""Traces as others published them: Microsoft's Philly job log and Alibaba's list of pods of 2023."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from cluster.errors import RequestError
from cluster.wording import counted
from infra.lab.simulator.jobs import Job, Trace, in_order

PHILLY_TIME = "%Y-%m-%d %H:%M:%S"
PODS_COLUMNS = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")


def read_philly(text: str, file: str) -> Trace:
    """The jobs of a `cluster_job_log` (github.com/msr-fiddle/philly-traces, "Schema").

    A job's size is that of its first attempt and its duration the time that all its attempts together ran.
    Jobs that no attempt was recorded of, or none with its start and end, are left out, as the notes of that
    page say that there are some. The virtual cluster (`vc`) is told as the user.

    Raises:
        RequestError: the file is not such a log.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{file} is no job log of Philly: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise RequestError(f"{file} is no job log of Philly: it should be a list of jobs")
    notes: Counter[str] = Counter()
    found: list[tuple[datetime, float, int, str, str]] = []
    for number, entry in enumerate(entries, 1):
        try:
            submitted = datetime.strptime(entry["submitted_time"], PHILLY_TIME)
            attempts: Sequence[Mapping[str, Any]] = entry["attempts"]
            ran_s = sum(_ran_s(attempt) for attempt in attempts)
            devices = sum(len(node["gpus"]) for node in attempts[0]["detail"]) if attempts else 0
            name, user = str(entry["jobid"]), str(entry.get("vc", ""))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(
                f"{file}: job {number} of the log has no readable {error}; it should have jobid,"
                f" submitted_time ({PHILLY_TIME}) and attempts with start_time, end_time and detail"
            ) from error
        if not devices:
            notes["left out: no device was recorded"] += 1
        elif ran_s <= 0:
            notes["left out: no start and end of a run was recorded"] += 1
        else:
            found.append((submitted, ran_s, devices, name, user))
    if not found:
        raise RequestError(f"{file} holds no job that ran")
    first = min(submitted for submitted, *_ in found)
    jobs = [
        Job(name, (submitted - first).total_seconds(), ran_s, group=devices, user=user)
        for submitted, ran_s, devices, name, user in found
    ]
    return Trace(in_order(_names_of_their_own(jobs)), file, _sentences(notes))


def _ran_s(attempt: Mapping[str, Any]) -> float:
    start, end = attempt["start_time"], attempt["end_time"]
    if start in (None, "", "None") or end in (None, "", "None"):
        return 0.0
    return max(
        0.0, (datetime.strptime(end, PHILLY_TIME) - datetime.strptime(start, PHILLY_TIME)).total_seconds()
    )


def read_pods(text: str, file: str) -> Trace:
    """The pods of an `openb_pod_list_*.csv` (github.com/alibaba/clusterdata, cluster-trace-gpu-v2023).

    A pod that shares a GPU takes a whole one here. Pods without GPUs, and those that were never scheduled or
    deleted, are left out. The kinds of GPUs that a pod asks for (`gpu_spec`) are not kept.

    Raises:
        RequestError: the file is not such a list.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise RequestError(f"{file} is no CSV: {error}") from error
    notes: Counter[str] = Counter()
    jobs = []
    for number, row in enumerate(rows, 2):
        try:
            devices = int(row["num_gpu"])
            shares = devices > 0 and int(row["gpu_milli"] or 0) < 1000
            created, scheduled, deleted = (
                _moment(row[name]) for name in ("creation_time", "scheduled_time", "deletion_time")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(
                f"{file}:{number}: no readable {error}; a list of pods has {', '.join(PODS_COLUMNS)}"
            ) from error
        if not devices:
            notes["left out: they ask for no GPU"] += 1
        elif created is None or scheduled is None or deleted is None or deleted <= scheduled:
            notes["left out: no start and end of a run was recorded"] += 1
        else:
            notes["given a whole GPU though they asked for a share"] += shares
            jobs.append(Job(row["name"], created, deleted - scheduled, group=devices))
    if not jobs:
        raise RequestError(f"{file} holds no pod with GPUs that ran")
    first = min(job.submit_s for job in jobs)
    moved = [replace(job, submit_s=job.submit_s - first) for job in jobs]
    return Trace(in_order(_names_of_their_own(moved)), file, _sentences(notes))


def _moment(text: str) -> float | None:
    if text.strip().lower() in ("", "nan"):
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _names_of_their_own(jobs: Sequence[Job]) -> list[Job]:
    """A name that was there before gets a number behind it."""
    seen: Counter[str] = Counter()
    renamed = []
    for job in jobs:
        seen[job.name] += 1
        times = seen[job.name]
        renamed.append(job if times == 1 else replace(job, name=f"{job.name}#{times}"))
    return renamed


def _sentences(notes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(f"{counted(number, 'job')} {what}" for what, number in notes.items() if number)
