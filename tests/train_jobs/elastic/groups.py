"""Runs a job's replica groups as plain processes of this machine: torch.distributed, no Ray."""

from __future__ import annotations

import json
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from cluster.config import TrainJobConfig
from tests.train_jobs.ranks import FileReporter, RankProcess, reports, start_program
from train_jobs.elastic.lighthouse import open_store
from train_jobs.elastic.membership import Goodbye, Membership, View, Word
from train_jobs.spec import DATA


class LocalLighthouse:
    """What the lighthouse's actor does, in a thread a caller."""

    def __init__(self, expected: list[str], timeout_s: float) -> None:
        self._membership = Membership(expected, timeout_s)
        self._decided = threading.Condition()
        self._store, self._address = open_store("127.0.0.1")

    def heartbeat(self, group: str, rank: int, view: int, timeout_s: float) -> Word:
        with self._decided:
            return self._membership.heard(group, rank, view, time.monotonic())

    def remind(self, view: View) -> None:
        raise AssertionError("this one does not die")

    def arrive(self, group: str, step: int, rank_count: int) -> tuple[View, str] | Goodbye:
        with self._decided:
            goodbye = self._membership.arrive(group, step, rank_count, time.monotonic())
            if goodbye is not None:
                return goodbye
            before = self._membership.view
            while True:
                if self._membership.decide(time.monotonic()) is not None:
                    self._decided.notify_all()
                view = self._membership.view
                if view is not None and view is not before and group in view.groups:
                    return view, self._address
                self._decided.wait(0.02)

    def leave(self, group: str) -> None:
        with self._decided:
            self._membership.leave(group)

    def ended(self, group: str) -> None:
        with self._decided:
            self._membership.ended(group)


class _Manager(BaseManager):
    pass


_Manager.register("Lighthouse", LocalLighthouse)
_Manager.register("reach")


class Groups:
    """A job's groups, started one by one; each leaves its reports in a directory of its own.

    Args:
        run: the run's directory, with its checkpoints.
        expected: the groups that the first step waits for.
    """

    def __init__(
        self, config: TrainJobConfig, run: Path, expected: list[str], timeout_s: float = 1.0
    ) -> None:
        from train_jobs.data.preparation import prepare_data

        self.config = config
        self.run = run
        self.processes: dict[str, list[RankProcess]] = {}
        prepare_data(config, run / DATA)
        self._lighthouse = LocalLighthouse(expected, timeout_s)
        _Manager.register("reach", callable=lambda: self._lighthouse)
        self._manager = _Manager(address=("127.0.0.1", 0), authkey=b"test")
        self._server = self._manager.get_server()
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
            )

    def leave(self, name: str) -> None:
        self._lighthouse.leave(name)

    def kill(self, name: str, rank: int = 0) -> None:
        self.processes[name][rank].kill()

    def wait(self, name: str) -> None:
        """Wait for a group's end; it has to be a good one."""
        for process in self.processes[name]:
            process.wait()
        for process in self.processes[name]:
            assert process.exit_code == 0, process.log.read_text()

    def at_step(self, step: int, timeout_s: float = 60.0) -> None:
        """Wait until the job has done so many steps."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(line["step"] >= step for line in self.lines()):
                return
            time.sleep(0.01)
        logs = "\n".join(process.log.read_text() for each in self.processes.values() for process in each)
        raise AssertionError(f"step {step} was not reached:\n{logs}")

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


class TimedReporter(FileReporter):
    """Says when, too."""

    def metric(self, line: dict[str, Any]) -> bool:
        return super().metric({**line, "time": time.time()})


def train_group(config_json: str, run: str, name: str, address: list[Any]) -> None:
    """A rank of a replica group, from joining to export; what it ends with is left beside its reports."""
    import hashlib

    import torch
    import torch.distributed as dist

    from cluster.storage import Storage
    from train_jobs.assembly import RankAssembly
    from train_jobs.workspace import Workspace

    manager = _Manager(address=tuple(address), authkey=b"test")
    manager.connect()
    config = TrainJobConfig.model_validate_json(config_json)
    assembly = RankAssembly(
        config,
        Workspace(Storage(Path(run))),
        1,
        ["node"] * dist.get_world_size(),
        TimedReporter(Path(run) / name),
        torch.device("cpu"),
        (name, manager.reach()),
    )
    assembly.begin()
    outcome = assembly.loop.run()
    if outcome == "finished" and assembly.quorum.leads:
        assembly.export()
    digest = hashlib.sha256()
    handed = assembly.state.handed_on()
    for key in sorted(handed["tensors"]):
        value = handed["tensors"][key]
        digest.update(value.detach().contiguous().numpy().tobytes() if hasattr(value, "numpy") else b"")
    end = {"outcome": outcome, "step": assembly.state.step, "digest": digest.hexdigest()}
    (Path(run) / name / f"end-{dist.get_rank()}.json").write_text(json.dumps(end))


def ends(run: Path, name: str) -> list[dict[str, Any]]:
    """How each rank of a group ended."""
    return [json.loads(path.read_text()) for path in sorted((run / name).glob("end-*.json"))]


__all__ = ["Groups", "ends", "reports"]
