"""What vLLM says of itself after each step, kept for `Engine.statistics` and for noticing that it hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_apps.engine.protocol import Statistics


@dataclass
class VllmStatistics:
    """The sums since the start, and the last values."""

    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    cache_tokens: int = 0
    cache_bytes: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    at: float = field(default_factory=time.monotonic)
    """Time of its last step (monotonic), or from when on one is waited for."""

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Called by vLLM after each step."""
        self.at = time.monotonic()
        self.steps += 1
        if scheduler is not None:
            self.running, self.waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            self.cache_use = scheduler.kv_cache_usage
            self.found_tokens += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self.preempted += iteration.num_preempted_reqs
            self.prompt_tokens += iteration.num_prompt_tokens
            self.generated_tokens += iteration.num_generation_tokens

    def as_statistics(self) -> Statistics:
        """In Shoal's words."""
        return Statistics(
            running=self.running,
            waiting=self.waiting,
            cache_use=self.cache_use,
            cache_tokens=self.cache_tokens,
            cache_bytes=self.cache_bytes,
            preempted=self.preempted,
            prompt_tokens=self.prompt_tokens,
            found_tokens=self.found_tokens,
            generated_tokens=self.generated_tokens,
            steps=self.steps,
        )


def make_recorder(record: Callable[[Any, Any], None]) -> Any:
    """A stat logger (vLLM's interface for that) that hands on what it is told."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Recorder
