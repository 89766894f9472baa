"""Everything one rank steps with, put together from the config; needs torch.distributed, and no Ray."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cluster.config.train_section import TrainJobConfig
from train_jobs.checkpoint.saver import CheckpointSaver
from train_jobs.checkpoint.state import TrainingState
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.data.samples import PackedSamples
from train_jobs.data.tokens import TokenStreams
from train_jobs.loop import Reporter, StepLoop
from train_jobs.optimization import build_optimizer, build_schedule
from train_jobs.parallel import STRATEGIES
from train_jobs.spec import CHECKPOINTS, EXPORT, TOKENS
from train_jobs.tasks import TASKS


class RankAssembly:
    """Mesh, model, strategy, optimizer, data and checkpoints of one rank; the default process group is there.

    Args:
        run: the run's directory, which already holds the tokenized corpus.
        attempt: counts from 1 over the life of the job.
    """

    def __init__(
        self, config: TrainJobConfig, run: Path, attempt: int, reporter: Reporter, device: torch.device
    ) -> None:
        self.config = config
        self.run = run
        self.streams = TokenStreams(run / TOKENS)
        self.task = TASKS[config.task](config, self.streams.vocab_size)
        plain = self.task.build()
        plain.to(device=device)  # type: ignore[call-arg]  # transformers wraps it without a signature
        self.architecture = plain.config
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        strategy = STRATEGIES[config.parallel.strategy](mesh, config.precision)
        model = strategy.parallelize(plain, self.task.blocks(plain))
        optimizer = build_optimizer(model, config.optimizer)
        schedule = build_schedule(optimizer, config.optimizer, config.steps)
        self.state = TrainingState(model, optimizer, schedule)
        self.store = CheckpointStore(run / CHECKPOINTS)
        self.saver = CheckpointSaver(
            self.store,
            self.state,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            on_commit=lambda step: reporter.event("checkpointed", attempt=attempt, step=step),
        )
        length = config.data.sequence_length
        self.loop = StepLoop(
            config=config,
            attempt=attempt,
            task=self.task,
            strategy=strategy,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            state=self.state,
            saver=self.saver,
            train=PackedSamples(self.streams.train, length),
            held_out=PackedSamples(self.streams.held_out, length, keep_tail=True),
            reporter=reporter,
            device=device,
        )

    def restore(self) -> int:
        """Go on from the newest complete checkpoint, the same on every rank; returns the steps done."""
        newest: list[int | None] = [None]
        if dist.get_rank() == 0:
            self.store.drop_incomplete()
            newest[0] = self.store.newest()
        dist.broadcast_object_list(newest)
        if newest[0] is not None:
            self.state.load(self.store.path(newest[0]))
            self.saver.last = self.state.step
        return self.state.step

    def export(self) -> None:
        """Leave the whole model in the run's directory, in the Hugging Face format. Called by all ranks."""
        weights = self.state.full_model()
        if dist.get_rank() == 0:
            directory = self.run / EXPORT
            shutil.rmtree(directory, ignore_errors=True)
            self.task.export(self.architecture, weights, self.streams.tokenizer_directory, directory)
        dist.barrier()
