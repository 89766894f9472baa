"""How one model is spread over the ranks: one file a strategy, one table from name to strategy."""

from __future__ import annotations

from train_jobs.parallel.ddp import DDP
from train_jobs.parallel.fsdp import FSDP
from train_jobs.parallel.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP, "fsdp": FSDP}
"""From the config's `parallel.strategy` to the class."""
