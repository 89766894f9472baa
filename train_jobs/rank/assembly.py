"""Everything one rank steps with, put together from the config; needs torch.distributed, and no Ray."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.planning.topology import mesh_shape
from train_jobs.checkpoint.restore import restore, restore_best
from train_jobs.checkpoint.retention import Retention
from train_jobs.checkpoint.saver import CheckpointSaver
from train_jobs.checkpoint.state import TrainingState
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.data.identity import samples_identity
from train_jobs.data.loader import make_loader
from train_jobs.data.order import BatchPlan, Place
from train_jobs.data.source import StreamSamples, as_samples, has_samples
from train_jobs.elastic.quorum import Quorum, WholeGroup
from train_jobs.elastic.replicas import RankLighthouse, ReplicaQuorum, ReplicaSettings
from train_jobs.errors import CheckpointError, LossError
from train_jobs.metering.flops import count_flops, peak_flops
from train_jobs.metering.forward_clock import ForwardClock
from train_jobs.metering.meter import Meter
from train_jobs.metering.pace import Pace
from train_jobs.optimization.loss_guard import LossGuard
from train_jobs.parallel import parallelize
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.randomness import key_of
from train_jobs.parallel.sharding import ShardedModel
from train_jobs.parallel.units import blocks_of
from train_jobs.rank.loop import Reporter, StepLoop
from train_jobs.records.run_log import has_saved
from train_jobs.records.workspace import Workspace
from train_jobs.spec import CHECKPOINTS, DATA, EXPORT, EXPORT_FACTS
from train_jobs.tasks import make_task
from train_jobs.tasks.weights import DTYPES, tied_names
from train_jobs.watch.progress import Progress


class RankAssembly:
    """Mesh, model, strategy, optimizer, data and checkpoints of one rank; the default process group is there.

    Args:
        workspace: the run's files, with the prepared data among them.
        attempt: counts from 1 over the life of the job.
        rank_nodes: the node of every rank, in rank order.
        replica: this group's name and the job's lighthouse, where the job consists of replica groups.
        progress: what the rank has done, for whoever watches it.
    """

    def __init__(
        self,
        config: TrainJobConfig,
        workspace: Workspace,
        attempt: int,
        rank_nodes: Sequence[str],
        reporter: Reporter,
        device: torch.device,
        replica: tuple[str, RankLighthouse] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.workspace = workspace
        self.progress = progress or Progress()
        recovery = config.recovery
        patience_s = max(recovery.start_timeout_s, recovery.save_timeout_s)
        self.mesh = Mesh(mesh_shape(config.parallel, rank_nodes), device, patience_s)
        self.task = make_task(config, workspace.directory / DATA)
        on_meta = self.task.builds_on_meta and config.parallel.shards and dist.get_world_size() > 1
        with torch.device("meta") if on_meta else nullcontext():
            model = self._build()
        self._tied = tied_names(model)
        samples = as_samples(self.task.samples(held_out=False), self.task.collate)
        if not has_samples(samples):
            raise RequestError("the task gives no sample to train on")
        flops = None
        if not isinstance(samples, StreamSamples):
            flops = count_flops(model, self.task, samples)
        blocks = blocks_of(model)  # FSDP2 gives them other names
        self.mesh.meet()  # one may read its weights and samples for longer than another
        self.parallel = parallelize(model, blocks, self.mesh, config)
        if on_meta:
            self._take_weights()
        optimizer = self.parallel.optimizer(config.optimizer)
        loss_scale = self.parallel.loss_scale(config)
        loader = make_loader(
            samples,
            BatchPlan(config.batch.global_size, config.batch.micro),
            config.seed,
            config.data.workers,
            samples_identity(config, samples, self.task.content),
        )
        self.guard = LossGuard(config.recovery)
        key = key_of(config.seed, self.mesh, None if replica is None else replica[0])
        self.state = TrainingState(self.parallel, optimizer, loss_scale, self.guard, loader, key)
        self.state.draw_anew()
        rate, source = peak_flops(device, config.precision)
        self.store = CheckpointStore(workspace.storage.child(CHECKPOINTS))
        self.event = partial(reporter.event, attempt=attempt)
        self.saver = CheckpointSaver(
            self.store, self.state, config.checkpoint, config.recovery.checkpoint_failures, self.event
        )
        self.progress.collectives = self.mesh.collectives_begun
        place = Place(self.mesh.data_index, self.mesh.shape.num_data_ranks)
        self.quorum: Quorum = WholeGroup(place, self._restore) if replica is None else self._replica(*replica)
        quorum = self.quorum
        self.loop = StepLoop(
            config=config,
            attempt=attempt,
            task=self.task,
            parallel=self.parallel,
            state=self.state,
            saver=self.saver,
            meter=Meter(
                device,
                flops,
                (rate, source),
                lambda: quorum.world_size,
                lambda: loader.waited_s,
                config.profile_every_steps,
            ),
            pace=self._pace(model, blocks, alone=replica is None and dist.get_world_size() == 1),
            quorum=quorum,
            reporter=reporter,
            progress=self.progress,
        )

    @property
    def notes(self) -> list[str]:
        """What a person should know of how the job is done."""
        warmup_steps, steps = self.config.optimizer.warmup_steps, self.config.steps
        cut = f"optimizer.warmup_steps: {steps} instead of {warmup_steps}, since the job has no more steps"
        notes = [*self.parallel.notes, *([cut] if warmup_steps > steps else [])]
        if isinstance(self.quorum, ReplicaQuorum) and self.mesh.device.type == "cuda":
            notes.append("replica groups were not run on GPUs yet; workers.group = workers.max makes one")
        return notes

    def _pace(self, model: nn.Module, blocks: Sequence[nn.Module], *, alone: bool) -> Pace | None:
        """What finds stragglers; None where nobody looks for them."""
        factor, loader = self.config.recovery.straggler_factor, self.state.loader
        if factor is None or alone:
            return None
        units: Sequence[nn.Module] = [model]
        if isinstance(self.parallel, ShardedModel) and blocks:
            # The whole waits for parameters that are gathered; and a compiled block is not to be broken up.
            units = [] if self.config.parallel.compile else blocks
        clock = ForwardClock(units, self.mesh.device)
        return Pace(clock, lambda: loader.waited_s, factor, watches=dist.get_rank() == 0)

    def _build(self) -> nn.Module:
        torch.manual_seed(
            self.config.seed
        )  # a task of the user's may not think of it, and ranks must be alike
        return self.task.build()

    def _take_weights(self) -> None:
        """Fill a model without weights from the one that rank 0 builds, which is gone on return."""
        assert isinstance(self.parallel, ShardedModel)
        with torch.random.fork_rng(devices=[]):  # ranks stay alike
            whole = self._build() if dist.get_rank() == 0 else None
        self.mesh.meet()
        self.parallel.take_weights(whole)

    def _replica(self, group: str, lighthouse: RankLighthouse) -> ReplicaQuorum:
        config = self.config
        ddp = config.parallel.ddp
        settings = ReplicaSettings(
            group=group,
            heartbeat_timeout_s=config.recovery.heartbeat_timeout_s,
            hang_timeout_s=config.recovery.hang_timeout_s,
            bucket_bytes=ddp.bucket_cap_mb * 2**20,
            dtype=DTYPES[ddp.compression] if ddp.compression in ("fp16", "bf16") else None,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        )
        return ReplicaQuorum(settings, lighthouse, self.state, self._restore, self.event, self.progress)

    def begin(self) -> int:
        """Go on from the newest good checkpoint, or with the other groups; returns the steps done."""
        if isinstance(self.quorum, ReplicaQuorum):
            self.loop.rehearse()  # the others wait for nothing that can be done before
            self.quorum.start()
        else:
            self._restore()
        return self.state.step

    def _restore(self, tidies: bool = True) -> None:
        """Load the newest good checkpoint, the same on every rank.

        Args:
            tidies: of several groups that restore at once, one clears away what cannot be loaded.

        Raises:
            LossError: the job goes back, and there is no checkpoint to go back to.
        """
        way = self.guard.returning
        before = None if way is None else way.before
        restored = restore(
            self.store,
            self.state,
            self.event,
            has_saved=lambda: has_saved(self.workspace.storage),
            begin_anew=self.config.recovery.begin_anew,
            tidies=tidies,
            before=before,
        )
        if restored is not None:
            self.saver.last = restored
        if way is not None:
            if restored is None:
                than = "" if before is None else f" than that of step {before}, which is no better"
                raise LossError(f"there is no checkpoint to go back to{than}")
            self.guard.returned(way)

    def export(self) -> None:
        """Leave the whole model with the run. Called by all ranks; the others do not wait for rank 0."""
        step = self.state.step
        if self.config.publish_best:
            saves = self.config.checkpoint
            best = restore_best(
                self.store, self.state, lambda: self.store.ranked(Retention.of(saves), saves.metric)
            )
            if best is None:
                raise CheckpointError(
                    f"no checkpoint has a {saves.metric} that is a number; none is the best"
                )
            step = best
        weights = self.state.full_model()
        if dist.get_rank() == 0:
            for name, first in self._tied.items():  # whatever a strategy has made of them
                weights[name] = weights[first]
            directory = self.workspace.directory / EXPORT
            shutil.rmtree(directory, ignore_errors=True)
            self.task.export(weights, directory)
            self.workspace.put(EXPORT)
            facts = self._of_export(step)
            self.workspace.storage.write_bytes(EXPORT_FACTS, json.dumps(facts).encode())
            self.event("exported", step=step, evaluation=facts["evaluation"])

    def _of_export(self, step: int) -> dict[str, Any]:
        """What is known of the model of a step; of one state, exported alike, it has one name."""
        checkpoint = self.store.look(step)
        state = uuid.uuid4().hex if checkpoint.manifest is None else checkpoint.manifest.digest
        name = hashlib.sha256(f"{state} {self.config.export.model_dump_json()}".encode()).hexdigest()
        return {"export": name, "step": step, "evaluation": checkpoint.evaluation}
