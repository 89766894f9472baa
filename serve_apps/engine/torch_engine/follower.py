"""The ranks beside rank 0: they do what it says until it says stop."""

from __future__ import annotations

import torch

from serve_apps.engine.protocol import EngineConfig, EngineError, WeightsError
from serve_apps.engine.torch_engine.model import read_facts
from serve_apps.engine.torch_engine.ranks import Ranks, device_of
from serve_apps.engine.torch_engine.runner import load_runner, load_together, park_together, wake_together
from serve_apps.engine.torch_engine.step import Kind
from serve_apps.engine.torch_engine.torch_options import TorchOptions


def follow(config: EngineConfig, rank: int, master_addr: str, master_port: int) -> None:
    """Run rank `rank` (1 or more) of a replica whose rank 0 is a `TorchEngine` with the same arguments.

    Blocks until rank 0 stops the replica.

    Raises:
        EngineError: the model cannot be run, or rank 0 (or another rank) vanished.
    """
    options = TorchOptions.of(config)
    facts = read_facts(config, config.model_path)
    torch.set_num_threads(config.threads)
    device = device_of(rank, config.device)
    ranks = Ranks(rank, config.tensor, config.max_batch, options)
    try:
        ranks.join(master_addr, master_port, device)
        runner = load_runner(config, facts, options, device, ranks)
        while True:
            kind, step, model_path = ranks.receive()
            if kind is Kind.STOP:
                return
            if kind is Kind.LOAD:
                try:
                    load_together(runner, model_path, ranks)
                except WeightsError as error:
                    print(f"rank {rank} keeps its weights: {error}", flush=True)
            elif kind is Kind.PARK:
                park_together(runner, ranks)
            elif kind is Kind.WAKE:
                wake_together(runner, ranks)
            elif step is not None:
                try:
                    runner.run(step)
                except RuntimeError as error:
                    raise EngineError(f"rank {rank} could not run a step: {error}") from error
    finally:
        ranks.leave()
