"""What it costs a rank to look for stragglers: CPU time of a step, beside the model's own.

python tests/benchmarks/pace_cost.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from train_jobs.metering.forward_clock import ForwardClock
from train_jobs.metering.pace import Pace
from train_jobs.metering.stragglers import Rank

STEPS, BLOCKS, MICRO_BATCHES = 400, 32, 8


def cpu_ms(step: Callable[[], None]) -> float:
    """Mean over all steps: some cost more than others."""
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS * 1e3


def main() -> None:
    torch.set_num_threads(1)
    plain, timed = ([nn.Identity() for _ in range(BLOCKS)] for _ in range(2))
    clock = ForwardClock(timed, torch.device("cpu"))
    batch = torch.zeros(1)

    def forward(blocks: list[nn.Module]) -> None:
        for _ in range(MICRO_BATCHES):
            with clock.micro_batch():
                for block in blocks:
                    block(batch)
        clock.forget()

    clocks = [cpu_ms(lambda: forward(timed)) - cpu_ms(lambda: forward(plain)) for _ in range(5)]
    print(f"clock, {BLOCKS} blocks, {MICRO_BATCHES} micro-batches: {statistics.median(clocks):.3f} ms")
    for size in (2, 8, 64, 512):
        ranks: list[Rank] = [(None, rank) for rank in range(size)]
        for watches in (False, True):
            pace = Pace(clock, lambda: 0.0, 2.0, watches=watches)

            def exchange(pace: Pace = pace, ranks: list[Rank] = ranks) -> None:
                row = torch.tensor(pace.row(0, len(ranks)), dtype=torch.float64)
                pace.take_in(ranks, row.add(0.05).tolist(), MICRO_BATCHES)

            cost = statistics.median(cpu_ms(exchange) for _ in range(5))
            print(f"totals of {size} ranks, {'rank 0' if watches else 'another rank'}: {cost:.3f} ms")


if __name__ == "__main__":
    main()
