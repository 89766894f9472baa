"""A cluster that a measurement starts for itself, in a directory of its own, and ends whatever happens."""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from cluster.config.loader import LoadedConfig, load_config
from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.hosts.processes import CLUSTER_ID, marked, of_node
from cluster.hosts.providers import PROVIDERS
from cluster.ray_private import RAYLET
from cluster.state.connection import ClusterRecord, connect, disconnect, head_is_silent
from infra.lifecycle import bring_up
from train_jobs.driver.submission import Submissions, new_job_id
from train_jobs.records.job_status import status_of
from train_jobs.records.listing import run_of
from train_jobs.records.run_config import read_run_config
from train_jobs.records.run_log import read_all_metrics, read_events, summarize

_LOOK_S = 0.05


class OwnCluster:
    """Up from the start to the end of a `with`; this process is connected to it meanwhile.

    Args:
        config: the sections of a `shoal.yaml`; the cluster's name and storage are chosen here.
        say: takes each sentence about what happens.
        directory: where config and storage go; a temporary one by default, which is removed.
        mark: SHOAL_CLUSTER_ID of its processes, where whoever started its nodes has chosen it.
    """

    record: ClusterRecord
    loaded: LoadedConfig

    def __init__(
        self,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        directory: Path | None = None,
        mark: str | None = None,
    ) -> None:
        self.config = dict(config)
        self.say = say
        self.directory = directory
        self._mark = mark
        self._ends = ExitStack()

    def __enter__(self) -> OwnCluster:
        with ExitStack() as ends:
            if self.directory is None:
                self.directory = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
            name = f"bench-{os.getpid()}-{secrets.token_hex(2)}"
            cluster = {"storage": "./storage", **self.config["cluster"], "name": name}
            path = self.directory / "shoal.yaml"
            path.write_text(json.dumps({**self.config, "cluster": cluster}, indent=2))  # which is YAML too
            self.loaded = load_config(path)
            resolved = self.loaded.resolved.cluster
            ends.callback(PROVIDERS[resolved.provider]().down, name, self.say, path)
            self._up()
            ends.callback(disconnect)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            self._ends.close()

    def up_again(self) -> None:
        """Start it anew after its head has died, as `shoal up` does; this process joins it."""
        self._up()

    def _up(self) -> None:
        config, path = self.loaded.resolved, self.loaded.path
        self.record = bring_up(config.cluster, path, self.say, serves=bool(config.serve_apps))[0].record
        connect(self.record)

    # -- jobs -------------------------------------------------------------------------------------------

    def submit(self, name: str, changes: Mapping[str, Any] | None = None) -> OwnJob:
        """Submit a job of the config, with other values for some of its keys."""
        config = self.loaded.resolved.train_jobs[name]
        if changes:
            config = type(config).model_validate({**config.model_dump(), **changes})
        job = new_job_id(name)
        storage = Storage(self.record.storage)
        Submissions(self.record).submit(storage, job, name, config, job, self.loaded.base)
        return OwnJob(self, job, run_of(storage, job))

    def serve(self, names: Sequence[str]) -> str:
        """Have these apps served; returns their base URL."""
        from serve_apps.commands import deploy

        return str(deploy(self.loaded.resolved, list(names), say=self.say)["base_url"])

    # -- processes --------------------------------------------------------------------------------------

    def processes(self, words: str, node: str | None = None) -> list[psutil.Process]:
        """Those of the cluster, or of one node, that run and have these words in their command line."""
        mark = self._mark or self.record.cluster_id
        found = []
        for process in marked(CLUSTER_ID, mark) if node is None else of_node(mark, node):
            with suppress(psutil.Error):  # it has ended
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def raylet(self, node: str) -> psutil.Process:
        """The raylet of the node of this name."""
        (raylet,) = [each for each in self.processes(RAYLET, node) if each.name() == RAYLET]
        return raylet

    def process(self, node: str, number: int) -> psutil.Process | None:
        """The process that has this number on its node, which is a host that counts its own, or this machine;
        None where there is none."""
        return next((each for each in self.processes("", node) if _own_number(each) == number), None)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Take no notice of Ctrl-C: a second one must not leave half of what the first one has begun to end."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _own_number(process: psutil.Process) -> int | None:
    """What a process calls itself; None where it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None


class OwnJob:
    """A job of such a cluster, as its files tell it."""

    def __init__(self, cluster: OwnCluster, job: str, run: Storage) -> None:
        self.cluster = cluster
        self.job = job
        self.run = run
        self.submission = job
        """Ray's id of its newest submission."""

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Its events, of these kinds or all, oldest first."""
        return [event for event in read_events(self.run) if not kinds or event["kind"] in kinds]

    def metrics(self) -> list[dict[str, Any]]:
        """Every line as it was logged; a step that was done again stands there again."""
        return read_all_metrics(self.run)

    def until(self, condition: Callable[[], Any], otherwise: str, timeout_s: float = 150.0) -> Any:
        """Wait until a condition holds; returns what it returned.

        Raises:
            ShoalError: it did not in time, or the job has ended; `otherwise` says what is missing.
        """
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            last = self.events("submitted", "finished")[-1:]  # it may have been resumed since it finished
            if last and last[0]["kind"] == "finished" and not condition():
                raise ShoalError(f"{otherwise}: the job has {last[0]['status']} ({last[0]['error']})")
            if time.monotonic() > deadline:
                raise ShoalError(f"{otherwise} within {timeout_s:.0f} s")
            time.sleep(_LOOK_S)
        return value

    def until_steps(self, count: int, timeout_s: float = 150.0) -> None:
        """Wait for so many more steps."""
        first = len(self.metrics())
        self.until(lambda: len(self.metrics()) >= first + count, f"{count} steps were not done", timeout_s)

    def rank_processes(self) -> list[psutil.Process]:
        """Those of the ranks of its newest attempt that run."""
        started = self.events("started")
        newest = [each for each in started if each["attempt"] == started[-1]["attempt"]]
        ranks = [rank for each in newest for rank in each["ranks"]]
        found = [self.cluster.process(rank["node"], rank["pid"]) for rank in ranks]
        return [each for each in found if each is not None]

    def status(self) -> str:
        """What `shoal jobs` says of it."""
        record = self.cluster.record
        statuses = None if head_is_silent(record) else Submissions(record).statuses()
        return status_of(summarize(self.job, self.run), statuses)

    def resume(self) -> None:
        """Submit it again after it has ended, as it was."""
        storage = Storage(self.cluster.record.storage)
        name, config = read_run_config(storage, self.job)
        self.submission = f"{self.job}-{secrets.token_hex(2)}"
        base = self.cluster.loaded.base
        Submissions(self.cluster.record).submit(storage, self.job, name, config, self.submission, base)

    def stop(self) -> None:
        """Ask it to stop, and wait until it has; one that has ended stays as it is."""
        if summarize(self.job, self.run).ended:
            return
        Submissions(self.cluster.record).stop(self.submission)
        deadline = time.monotonic() + 150.0
        while not summarize(self.job, self.run).ended:
            if time.monotonic() > deadline:
                raise ShoalError(f"{self.job} does not stop")
            time.sleep(_LOOK_S)
