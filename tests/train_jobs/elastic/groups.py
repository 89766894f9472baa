"""Runs a job's replica groups as plain processes of this machine: torch.distributed, no Ray."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.bad_steps import digest, slow_down, spoil
from tests.train_jobs.ranks import FileReporter, RankProcess, start_program
from train_jobs.elastic.membership import Beat, Goodbye, Membership, Standing, View, Word
from train_jobs.parallel.rendezvous import open_store
from train_jobs.records.run_log import metric_key
from train_jobs.spec import DATA
from train_jobs.watch.progress import HangWatch, Progress
from train_jobs.watch.rank_watch import OF_HANG_TIMEOUT


class LocalLighthouse:
    """What the lighthouse's actor does, in a thread a caller."""

    def __init__(self, expected: list[str], timeout_s: float) -> None:
        self._membership = Membership(expected, timeout_s)
        self._decided = threading.Condition()
        self._store, self._address = open_store("127.0.0.1")

    def heartbeat(self, beat: Beat, at_once: bool) -> Word:
        with self._decided:
            return self._membership.heard(beat, time.monotonic())

    def remind(self, view: View) -> None:
        raise AssertionError("this one does not die")

    def arrive(self, group: str, standing: Standing, rank_count: int) -> tuple[View, str] | Goodbye:
        with self._decided:
            self._membership.arrive(group, standing, rank_count, time.monotonic())
            while True:
                if self._membership.decide(time.monotonic()) is not None:
                    self._decided.notify_all()
                answer = self._membership.answer(group, standing, time.monotonic())
                if isinstance(answer, Goodbye):
                    return answer
                if answer is not None:
                    return answer, self._address
                self._decided.wait(0.02)

    def leave(self, group: str) -> None:
        with self._decided:
            self._membership.leave(group)

    def ended(self, group: str) -> None:
        with self._decided:
            self._membership.ended(group)


class _Manager(BaseManager):
    pass


_Manager.register("reach")


class Groups:
    """A job's groups, started one by one; each leaves its reports in a directory of its own.

    Args:
        run: the run's directory, with its checkpoints.
        expected: the groups that the first step waits for.
        pace_s: seconds by which every step is slowed down.
        spoilt: by global batch, what its loss is multiplied by.
        slow: the group whose forward passes take three times as long as the others'.
        saving: a group whose saves take so many seconds longer; ranks that hang end then, as under a worker.
    """

    def __init__(
        self,
        config: TrainJobConfig,
        run: Path,
        expected: list[str],
        timeout_s: float = 3.0,
        pace_s: float = 0.0,
        spoilt: dict[int, float] | None = None,
        slow: str | None = None,
        saving: tuple[str, float] = ("", 0.0),
    ) -> None:
        from train_jobs.data.preparation import prepare_data

        self.config = config
        self.run = run
        self.pace_s = pace_s
        self.trouble = (json.dumps(spoilt or {}), slow, *saving)
        self.processes: dict[str, list[RankProcess]] = {}
        prepare_data(config, run / DATA)
        self._lighthouse = LocalLighthouse(expected, timeout_s)

        class Answering(BaseManager):
            """One for each: ranks that a test has left behind must not meet those of the next."""

        Answering.register("reach", callable=lambda: self._lighthouse)
        self._server = Answering(address=("127.0.0.1", 0), authkey=b"test").get_server()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def start(self, *names: str, size: int = 1) -> None:
        """Start groups of so many ranks each."""
        for name in names:
            self.processes[name] = start_program(
                train_group,
                self.run / name,
                size,
                self.config.model_dump_json(),
                str(self.run),
                name,
                list(self._server.address),
                self.pace_s,
                *self.trouble,
            )

    def leave(self, name: str) -> None:
        self._lighthouse.leave(name)

    def kill(self, name: str, rank: int = 0) -> None:
        self.processes[name][rank].kill()

    def stop(self, name: str, sent: signal.Signals = signal.SIGSTOP, rank: int = 0) -> None:
        """Send a signal to a rank."""
        self.processes[name][rank].signal(sent)

    def wait(self, *names: str) -> list[dict[str, Any]]:
        """Wait for the end of groups, which has to be a good one; how each of their ranks ended."""
        for process in (each for name in names for each in self.processes[name]):
            process.wait()
            assert process.exit_code == 0, process.log.read_text()
        return [
            json.loads(path.read_text()) for name in names for path in sorted((self.run / name).glob("end-*"))
        ]

    def changed(self, count: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the groups have changed so many times; the last change."""
        return self._until(lambda: (self.events("resized")[count - 1 :] or [None])[0], timeout_s)

    def at_step(self, step: int, timeout_s: float = 60.0) -> None:
        """Wait until the job has done so many steps."""
        self._until(lambda: any(line["step"] >= step for line in self.lines()), timeout_s)

    def saves(self, name: str, step: int, timeout_s: float = 60.0) -> None:
        """Wait until a group whose saves are slow has begun one."""
        self._until((self.run / name / f"saves-{step}").exists, timeout_s)

    def _until(self, found: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            value = found()
            if value:
                return value
            time.sleep(0.02)
        logs = "\n".join(process.log.read_text() for each in self.processes.values() for process in each)
        raise AssertionError(f"it did not happen within {timeout_s:.0f} s:\n{logs}")

    def digests(self) -> dict[tuple[int, int, int], set[str]]:
        """By rank, step and ranks in all: the groups' states after it; one each where all are alike."""
        found: dict[tuple[int, int, int], set[str]] = {}
        for path in self.run.glob("*/digests-*.jsonl"):
            rank = int(path.stem.partition("-")[2])
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # cut off by a SIGKILL
                    step, ranks, digest = json.loads(line)
                    found.setdefault((rank, step, ranks), set()).add(digest)
        return found

    def lines(self) -> list[dict[str, Any]]:
        """The metrics of all groups, in the order of time."""
        found = []
        for name in self.processes:
            if (self.run / name / "reports.jsonl").exists():
                found += [each | {"group": name} for each in self._reports(name) if "kind" not in each]
        return sorted(found, key=lambda line: line["time"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for name in self.processes for line in self._reports(name) if line.get("kind") == kind]

    def _reports(self, name: str) -> list[dict[str, Any]]:
        path = self.run / name / "reports.jsonl"
        if not path.exists():
            return []
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class PacedReporter(FileReporter):
    """Says when, too, and takes its time."""

    def __init__(self, run: Path, pace_s: float) -> None:
        super().__init__(run)
        self.pace_s = pace_s

    def metric(self, line: dict[str, Any]) -> bool:
        said = [
            metric_key(json.loads(text))
            for path in self.path.parent.parent.glob("*/reports.jsonl")
            for text in path.read_text().splitlines()
            if '"loss"' in text and '"kind"' not in text
        ]
        if metric_key(line) <= max(said, default=(0, 0, 0, 0)):
            return False
        stop = super().metric({**line, "time": time.time()})
        time.sleep(self.pace_s)
        return stop


@contextlib.contextmanager
def ended_if_it_hangs(progress: Progress, hang_timeout_s: float) -> Iterator[None]:
    """End this process where it hangs, as its worker would."""
    over, watch = threading.Event(), HangWatch(OF_HANG_TIMEOUT * hang_timeout_s, time.monotonic(), math.inf)

    def look() -> None:
        while not over.wait(0.05):
            watch.heard(progress.activity, time.monotonic())
            if (wrong := watch.hang(time.monotonic())) is not None:
                print(f"the rank {wrong}", flush=True)
                os._exit(1)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def train_group(
    config_json: str,
    run: str,
    name: str,
    address: list[Any],
    pace_s: float,
    spoilt: str,
    slow: str | None,
    saving: str,
    saves_s: float,
) -> None:
    """A rank of a replica group, from joining to export; its state after every step is left as a digest."""
    import torch
    import torch.distributed as dist

    from cluster.files.storage import Storage
    from train_jobs.rank.assembly import RankAssembly
    from train_jobs.records.workspace import Workspace

    manager = _Manager(address=tuple(address), authkey=b"test")
    manager.connect()
    config = TrainJobConfig.model_validate_json(config_json)
    directory, rank = Path(run) / name, dist.get_rank()
    recovery = config.recovery
    progress = Progress(recovery.start_timeout_s, recovery.save_timeout_s)
    assembly = RankAssembly(
        config,
        Workspace(Storage(Path(run))),
        1,
        ["node"] * dist.get_world_size(),
        PacedReporter(directory, pace_s),
        torch.device("cpu"),
        (name, manager.reach()),
        progress,
    )
    if name == saving:
        save = assembly.saver.save

        def save_slowly() -> None:
            (directory / f"saves-{assembly.state.step}").touch()
            time.sleep(saves_s)
            save()

        assembly.saver.save = save_slowly  # type: ignore[method-assign]
    spoil(assembly.loop, json.loads(spoilt))
    if slow is not None:
        slow_down(assembly.parallel.module, lambda: 3.0 if name == slow else 1.0)
    with (directory / f"digests-{rank}.jsonl").open("a", buffering=1) as digests:
        step = assembly.loop.step

        def step_and_digest() -> bool:
            stop = step()
            digests.write(
                json.dumps([assembly.state.step, assembly.quorum.world_size, digest(assembly.state)]) + "\n"
            )
            return stop

        assembly.loop.step = step_and_digest  # type: ignore[method-assign]
        assembly.begin()
        watched = ended_if_it_hangs(progress, recovery.hang_timeout_s)
        with watched if saving else contextlib.nullcontext():
            outcome = assembly.loop.run()
            with progress.saving():
                if outcome == "finished" and assembly.quorum.leads:
                    assembly.export()
    end = {"outcome": outcome, "step": assembly.state.step, "leads": assembly.quorum.leads}
    (directory / f"end-{rank}.json").write_text(json.dumps(end))
