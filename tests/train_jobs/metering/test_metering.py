"""Figures of merit: counted arithmetic, uncovered intervals, and what a run says of itself."""

from __future__ import annotations

import math
import time
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from cluster.planning.hardware import CATALOGUE, find_accelerator
from tests.train_jobs.ranks import reports, run_ranks, tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data
from train_jobs.metering.communication import exposed_s
from train_jobs.metering.flops import count_flops, peak_flops
from train_jobs.metering.intervals import uncovered, union
from train_jobs.metering.meter import Meter
from train_jobs.tasks import make_task

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
)


@given(spans, spans)
def test_what_is_not_covered_equals_looking_at_every_moment(
    wanted: list[tuple[float, float]], cover: list[tuple[float, float]]
) -> None:
    def holds(intervals: list[tuple[float, float]], moment: float) -> bool:
        return any(start < moment < end for start, end in intervals)

    moments = [half + 0.5 for half in range(80)]
    expected = sum(holds(wanted, moment) and not holds(cover, moment) for moment in moments)
    assert uncovered(wanted, cover) == expected
    merged = union(wanted)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    assert sum(end - start for start, end in merged) == sum(holds(wanted, moment) for moment in moments)


@dataclass
class Event:
    name: str
    start: float
    end: float
    device_type: DeviceType = DeviceType.CPU

    @property
    def time_range(self) -> Event:
        return self


def test_a_collective_is_exposed_where_nothing_computes() -> None:
    on_cpu = [Event("aten::mm", 0, 10), Event("gloo:all_reduce", 5, 30), Event("aten::add", 20, 25)]
    assert exposed_s([*on_cpu, Event("c10d::allreduce_", 0, 30)], "cpu") == pytest.approx(15e-6)
    gpu = DeviceType.CUDA
    on_gpu = [
        Event("ncclDevKernel_AllReduce_Sum_f32", 0, 100, gpu),
        Event("ampere_sgemm", 20, 70, gpu),
        Event("aten::mm", 0, 100),
    ]
    assert exposed_s(on_gpu, "cuda") == pytest.approx(50e-6)


def test_the_arithmetic_of_a_model_is_counted_without_computing_it(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    prepare_data(config, tmp_path / "data")
    task = make_task(config, tmp_path / "data")
    model, samples = task.build(), task.samples(held_out=False)
    counted = count_flops(model, task, samples)  # type: ignore[arg-type]
    tokens, length, width, layers = 16, 16, 32, 2
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - 300 * width  # but the embedding
    forward = 2 * tokens * matrices
    attention = layers * 4 * tokens * length * width
    # Backward takes twice the forward's; attention's computes one of its products anew (2.5 times).
    assert counted == pytest.approx(3 * forward + 3.5 * attention, rel=0.01)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_peaks_come_from_the_catalogue_or_are_measured() -> None:
    known = find_accelerator("NVIDIA H100 80GB HBM3")
    assert known is not None
    assert (known.name, known.flops["bf16"], known.memory_bytes) == ("H100-SXM", 989e12, 80e9)
    names = {"NVIDIA A100-SXM4-80GB": "A100-SXM-80GB", "NVIDIA H100 PCIe": "H100-PCIe", "Tesla T4": "T4"}
    names |= {"NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "NVIDIA A10G": "A10G", "NVIDIA H200": "H200-SXM"}
    for device, name in names.items():
        found = find_accelerator(device)
        assert found is not None
        assert found.name == name
    assert find_accelerator("AMD Instinct MI300X") is None
    assert all(entry.flops["bf16"] > entry.flops["fp32"] for entry in CATALOGUE.values())
    peak, source = peak_flops(torch.device("cpu"), "fp32")
    assert source == "measured"
    assert 1e9 < peak < 1e14


def test_a_run_says_how_fast_it_was_and_on_what_its_time_went(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"), steps=12, parallel={"strategy": "fsdp"})
    metrics = run_ranks(config, tmp_path, 2)
    for line in metrics:
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_s"], rel=1e-3)
        assert line["samples_per_s"] == pytest.approx(8 / line["step_s"], rel=1e-3)
        assert 0 < line["mfu"] < 1
        assert 0 <= line["data_wait"] < 1
        assert line["peak_memory_bytes"] > 50e6
    assert [line["step"] for line in metrics if line.get("profiled")] == [5]
    assert [line["communication"] for line in metrics[:4]] == [None] * 4
    assert all(0 < line["communication"] < 1 for line in metrics[4:])
    (totals,) = [line for line in reports(tmp_path) if line.get("kind") == "measured"]
    steady = sorted(line["tokens_per_s"] for line in metrics if not line.get("profiled"))
    assert totals["tokens_per_s"] == steady[len(steady) // 2]
    assert totals["steps"] == 11
    assert math.isclose(totals["communication"], metrics[-1]["communication"])


def test_one_process_communicates_nothing_that_matters(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    metrics = run_ranks(config, tmp_path, 1)
    assert metrics[-1]["communication"] < 0.05


def test_a_million_steps_take_no_memory_to_speak_of() -> None:
    meter = Meter(torch.device("cpu"), None, (1e12, "nobody"), lambda: 1, waited_s=lambda: 0.0)
    tracemalloc.start()
    for _ in range(20_000):
        meter.steps = 1  # no step is profiled
        meter._began = time.perf_counter() - 0.5
        meter.line(8, None)
    most = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert most / 20_000 < 100, "bytes a step; with a dict for each it was 430"
    totals = meter.totals()
    assert totals is not None
    assert (totals["steps"], totals["tokens_per_s"], totals["mfu"]) == (20_000, None, None)
    assert totals["step_s"] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(("every", "profiled"), [(None, []), (10, [5, 15]), (200, [5])])
def test_one_step_in_so_many_is_profiled_or_none(every: int | None, profiled: list[int]) -> None:
    meter = Meter(torch.device("cpu"), None, (1e12, "nobody"), lambda: 1, lambda: 0.0, every)
    found = []
    for step in range(1, 20):
        meter.steps = step
        if meter.profiled:
            found.append(step)
    assert found == profiled


def test_a_job_that_profiles_nothing_knows_no_share_of_communication(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"), steps=7, profile_every_steps=None)
    metrics = run_ranks(config, tmp_path, 1)
    assert len(metrics) == 7
    assert not any(line.get("profiled") for line in metrics)
    assert {line["communication"] for line in metrics} == {None}
