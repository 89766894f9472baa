"""Devices that change hands under a load: an elastic job gives them to an app, and takes them back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import httpx

from cluster.errors import ShoalError
from cluster.storage import Storage
from train_jobs.run_log import read_metrics

REQUEST_TIMEOUT_S = 60.0
_LOOK_S = 0.25


class Load:
    """Clients that keep so many requests in flight, from the start to the end of a `with`.

    Attributes:
        answered: when each whole answer came, by which replica, and with how many tokens.
        failures: what went wrong, one line a request.
    """

    def __init__(self, base_url: str, app: str, clients: int, prompt: str, max_tokens: int = 64) -> None:
        self.url = f"{base_url}/completions"
        self.body = {"model": app, "prompt": prompt, "max_tokens": max_tokens}
        self.clients = clients
        self.answered: list[tuple[float, str, int]] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)

    def __enter__(self) -> Load:
        self.began = time.time()
        for index in range(self.clients):
            self._pool.submit(self._ask, index)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        self.ended = time.time()

    @property
    def replicas(self) -> set[str]:
        return {replica for _, replica, _ in self.answered}

    @property
    def tokens_per_s(self) -> float:
        return sum(tokens for *_, tokens in self.answered) / (self.ended - self.began)

    def _ask(self, index: int) -> None:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S) as http:
            while not self._stop.is_set():
                try:
                    answer = http.post(self.url, json={**self.body, "seed": index})
                except httpx.HTTPError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    continue
                if answer.status_code != 200:
                    self.failures.append(f"{answer.status_code}: {answer.text}")
                    continue
                tokens = answer.json()["usage"]["completion_tokens"]
                self.answered.append((time.time(), answer.headers["x-shoal-replica"], tokens))


@dataclass
class Round:
    """One rise and fall of a load; durations from the rise, unless they say otherwise.

    Attributes:
        decided_s: until training was told to give devices up.
        left_s: until its groups had left, at a step boundary.
        granted_s: until the app was granted the devices.
        answered_s: until the new replica had answered a request.
        back_s: from the fall until training stepped on the devices again.
        steps_lost, steps_repeated: of the job, over the whole round.
    """

    workers_before: int = 0
    workers_under_load: int = 0
    decided_s: float | None = None
    left_s: float | None = None
    granted_s: float | None = None
    answered_s: float | None = None
    back_s: float | None = None
    requests: int = 0
    failed: int = 0
    tokens_per_s: float = 0.0
    steps: int = 0
    steps_lost: int = 0
    steps_repeated: int = 0
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class GiveAndTake:
    """An elastic job that steps, and an app beside it whose load rises and falls.

    Args:
        run: the job's directory in the storage.
        job_holder, app_holder: whose leases they are.
        events: the newest events of the broker, oldest first.
    """

    def __init__(
        self,
        run: Storage,
        job_holder: str,
        app_holder: str,
        events: Callable[[], list[dict[str, Any]]],
        timeout_s: float = 150.0,
    ) -> None:
        self.run = run
        self.job_holder = job_holder
        self.app_holder = app_holder
        self.events = events
        self.timeout_s = timeout_s

    def round(self, load: Load, replicas_before: int, workers: int) -> Round:
        """Let the load rise until there is a replica more, and fall until training has its workers again.

        Raises:
            ShoalError: that did not happen in time.
        """
        self.until(lambda: self.world_size >= workers, f"the job never had {workers} workers")
        found = Round(workers_before=self.world_size)
        first = self.steps[-1]
        with load:
            self.until(
                lambda: len(load.replicas) > replicas_before or bool(load.failures),
                f"{replicas_before} replicas and no more answered under load",
            )
            found.workers_under_load = self.world_size
        self._note_requests(found, load, replicas_before)
        self.until(
            lambda: self.world_size >= found.workers_before and self.world_size > found.workers_under_load,
            f"the job never had its {found.workers_before} workers back",
        )
        found.back_s = time.time() - load.ended
        self._note_course(found, load.began)
        steps = [step for step in self.steps if step >= first]
        found.steps = len(set(steps))
        found.steps_lost = steps[-1] - first + 1 - len(set(steps))
        found.steps_repeated = len(steps) - len(set(steps))
        return found

    @property
    def steps(self) -> list[int]:
        """The steps of the job as they were logged."""
        lines = self.run.read_bytes("metrics.jsonl").decode().splitlines()
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    @property
    def world_size(self) -> int:
        """Of the job's last step; 0 before the first."""
        lines = read_metrics(self.run)
        return lines[-1]["world_size"] if lines else 0

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition."""
        deadline, pause = time.monotonic() + self.timeout_s, threading.Event()
        while not condition():
            if time.monotonic() >= deadline:
                raise ShoalError(f"{otherwise} within {self.timeout_s:.0f} s")
            pause.wait(_LOOK_S)

    def _note_requests(self, found: Round, load: Load, replicas_before: int) -> None:
        found.requests, found.failed = len(load.answered) + len(load.failures), len(load.failures)
        found.failures, found.tokens_per_s = load.failures[:3], load.tokens_per_s
        seen: set[str] = set()
        for when, replica, _ in load.answered:
            seen.add(replica)
            if len(seen) > replicas_before:
                found.answered_s = when - load.began
                return

    def _note_course(self, found: Round, began: float) -> None:
        """What the broker and the job say of the rise."""
        after = [event for event in self.events() if _time(event) >= began]

        def first(holder: str, *causes: str) -> float | None:
            times = [_time(e) for e in after if e.get("holder") == holder and e["cause"] in causes]
            return times[0] - began if times else None

        found.decided_s = first(self.job_holder, "gave_way")
        found.granted_s = first(self.app_holder, "grew", "started")
        lines = self.run.read_bytes("events.jsonl").decode().splitlines()
        left = [
            _time(event) - began
            for event in map(json.loads, lines)
            if event["kind"] in ("resized", "ended") and event.get("left", True) and _time(event) >= began
        ]
        found.left_s = left[0] if left else None


def _time(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()
