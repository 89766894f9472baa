"""The process of one rank, from its first line to its last; needs torch, and no Ray."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from cluster.files.storage import Storage
from cluster.node.shared_imports import tell_imports
from train_jobs.elastic.membership import Beat, Goodbye, Standing, View, Word
from train_jobs.errors import RankError, ScriptError, ScriptHangError, bases_of
from train_jobs.parallel.mesh import AFTER_HANG_S
from train_jobs.parallel.rendezvous import join, open_store, reach_store, record_flights, use_interface_of
from train_jobs.rank.assembly import RankAssembly
from train_jobs.rank.link import LinkAddress, RankOrder, Worker, reach_heart, reach_worker
from train_jobs.rank.reporters import is_collective, reporter_of, say_started
from train_jobs.rank.script import THREADS, torchrun_environment
from train_jobs.rank.script_run import ScriptRun
from train_jobs.records.workspace import Workspace
from train_jobs.spec import DATA
from train_jobs.watch.progress import Progress
from train_jobs.watch.rank_stacks import waits_for_others, write_stacks_when_asked

_TELL_S = 1.0
_WORDS_PER_TIMEOUT = 20


def run_rank_process(address: str, authkey: str) -> None:
    """Do what the worker there orders.

    Args:
        authkey: in hexadecimal digits.
    """
    worker = reach_worker(LinkAddress(address, bytes.fromhex(authkey)))
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=worker.leave, daemon=True).start())
    order = worker.order()
    threading.Thread(target=_go_with, args=(worker, order), name="worker's end", daemon=True).start()
    os.environ.update(order.environment)
    recovery = order.spec.config.recovery
    progress = Progress(recovery.start_timeout_s, recovery.save_timeout_s)
    _be_watched(worker, progress, recovery.hang_timeout_s)
    scripted = order.spec.config.task == "script"
    run = ScriptRun(order, worker, progress) if scripted else _TaskRun(order, worker, progress)
    try:
        with progress.starting():
            run.prepare()  # before the ranks meet: then nobody waits for a node that still fetches
            _meet(order, worker)
        status = run.run()
    except Exception as error:  # noqa: BLE001  (whatever it is, the driver judges it)
        worker.fail(_as_it_travels(error, order.place.rank, run.step))
    else:
        worker.finish(status)


def _as_it_travels(error: Exception, rank: int, step: int | None) -> RankError:
    hung = isinstance(error, ScriptHangError)
    trace = error.output if isinstance(error, ScriptError) else traceback.format_exc()
    kind = "Hang" if hung else type(error).__name__
    collective = is_collective(error) or (hung and waits_for_others(trace))
    return RankError(
        rank, step, kind, str(error), trace, collective=collective, hung=hung, bases=bases_of(error)
    )


def _go_with(worker: Worker, order: RankOrder) -> None:
    """End this process when its worker is gone: its devices belong to somebody else then."""
    try:
        worker.stay()
    finally:
        if order.flights is not None:  # else its worker removes it
            shutil.rmtree(Path(order.flights).parent, ignore_errors=True)
        os._exit(1)


def _be_watched(worker: Worker, progress: Progress, hang_timeout_s: float) -> None:
    """Let the worker see whether this process still gets on, and where it is when it does not."""
    worker.watch(os.getpid(), write_stacks_when_asked())
    period = min(_TELL_S, hang_timeout_s / _WORDS_PER_TIMEOUT)

    def tell() -> None:
        while True:
            worker.progress(progress.activity)
            time.sleep(period)

    threading.Thread(target=tell, name="activity to the worker", daemon=True).start()


def _meet(order: RankOrder, worker: Worker) -> None:
    """Make the group's default process group, and the environment that torchrun would have made."""
    config, place = order.spec.config, order.place
    threads = None if THREADS in config.env else max(1, config.workers.cpus)
    if threads is not None:
        torch.set_num_threads(threads)
    # A script has its device for itself: no context of ours may lie beside its own.
    device = None if config.task == "script" else order.device
    if device is not None:
        torch.cuda.set_device(device)
    if place.rank == 0:
        store, address = open_store(order.host)
        worker.rendezvous(address)
    else:
        address = worker.rendezvous(None)
        store = reach_store(address)
    host, _, port = address.rpartition(":")
    os.environ.update(
        torchrun_environment(
            place,
            (host, int(port)),
            order.spec.job,
            order.spec.attempt,
            threads,
            config.recovery.worker_failures,
        )
    )
    use_interface_of(order.host)
    if order.flights is not None:
        record_flights(order.flights)  # a script has them from this process
    # Offloaded gradients lie on the CPU, and their norm is summed there.
    backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
    # The worker sees a hang first, and where it is; this is for what it cannot see. Once the first step is
    # done the limit is that of a step (train_jobs.parallel.mesh).
    limit_s = config.recovery.start_timeout_s + AFTER_HANG_S
    join(backend, store, (place.rank, place.world_size), limit_s)


class _LinkedLighthouse:
    """A replica group's line to the lighthouse of its job: heartbeats go the shortest way."""

    def __init__(self, order: RankOrder, worker: Worker) -> None:
        assert order.heart is not None, "there are other groups"
        self._attempt = order.spec.attempt
        self._heart = reach_heart(order.heart)
        self._worker = worker

    def heartbeat(self, beat: Beat, at_once: bool) -> Word:
        return self._heart.heartbeat(self._attempt, beat, at_once)

    def remind(self, view: View) -> None:
        self._worker.remind(view)

    def arrive(self, group: str, standing: Standing, rank_count: int) -> tuple[View, str] | Goodbye:
        return self._worker.arrive(group, standing, rank_count)


class _TaskRun:
    """A rank of one of our own step loops."""

    def __init__(self, order: RankOrder, worker: Worker, progress: Progress) -> None:
        self.order = order
        self.worker = worker
        self.progress = progress
        self.reporter = reporter_of(order, worker)
        self.assembly: RankAssembly | None = None
        self.workspace = Workspace(Storage(order.spec.run))

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self.assembly is None else self.assembly.state.step

    def prepare(self) -> None:
        """Have this node's copy of the data."""
        self.workspace.fetch(DATA)

    def run(self) -> str:
        with self.progress.starting():
            assembly = self._begin()
        outcome = assembly.loop.run()
        if outcome != "finished":
            return outcome
        if not assembly.quorum.leads:
            return "followed"  # the job has finished when the leading group has exported the model
        with self.progress.saving():
            assembly.export()
        return "finished"

    def _begin(self) -> RankAssembly:
        order, spec = self.order, self.order.spec
        device = torch.device("cpu") if order.device is None else torch.device("cuda", order.device)
        self.reporter.event("entered", attempt=spec.attempt, group=spec.name)
        replica = None if order.heart is None else (spec.name, _LinkedLighthouse(order, self.worker))
        assembly = RankAssembly(
            spec.config,
            self.workspace,
            spec.attempt,
            spec.nodes,
            self.reporter,
            device,
            replica,
            self.progress,
        )
        self.assembly = assembly
        step = assembly.begin()
        mesh, notes = asdict(assembly.mesh.shape), assembly.notes
        workers = assembly.quorum.world_size
        tell_imports()
        say_started(order, self.reporter, step=step, mesh=mesh, notes=notes, workers=workers)
        return assembly
