"""The scaling table: medians, speed-up, efficiency, and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import RequestError
from infra.lab.bench.plot import draw
from infra.lab.bench.scaling import ScalingRun, document, order, table


def trial(strategy: str, workers: int, rate: float, **totals: Any) -> ScalingRun:
    facts = {
        "tokens_per_s": rate,
        "samples_per_s": rate / 10,
        "step_s": 1000 / rate,
        "communication": 0.1 * workers,
        "data_wait": 0.01,
        "mfu": 0.3,
        "peak_memory_bytes": int(rate),
        "peak_flops": 1e12,
        "peak_flops_from": "measured",
    }
    return ScalingRun(strategy, workers, {**facts, **totals})


TRIALS = [
    *(trial("ddp", 1, 100), trial("fsdp", 1, 80), trial("ddp", 2, 190), trial("fsdp", 2, 120)),
    *(trial("ddp", 1, 110), trial("fsdp", 1, 90), trial("ddp", 2, 150), trial("fsdp", 2, 140)),
    *(trial("ddp", 1, 60), trial("fsdp", 1, 85), trial("ddp", 2, 200), trial("fsdp", 2, 136)),
]


def test_runs_take_turns() -> None:
    assert order(["a", "b"], [1, 2], 2) == [("a", 1), ("b", 1), ("a", 2), ("b", 2)] * 2


def test_a_row_is_the_median_of_its_runs_and_is_compared_with_its_own_strategy() -> None:
    rows = {(row.strategy, row.workers): row for row in table(TRIALS)}
    assert list(rows) == [("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)]
    ddp = rows["ddp", 2]
    assert (ddp.runs, ddp.rate, ddp.spread) == (3, 190, (150, 200))
    assert ddp.speed_up == pytest.approx(1.9)
    assert ddp.efficiency == pytest.approx(0.95)
    assert rows["fsdp", 2].speed_up == pytest.approx(136 / 85)
    assert (rows["ddp", 1].speed_up, rows["ddp", 1].efficiency) == (1, 1)
    assert ddp.peak_memory_bytes == 200
    assert ddp.communication == pytest.approx(0.2)


def test_efficiency_counts_from_the_fewest_workers_there_were() -> None:
    (_, eight) = table([trial("fsdp", 4, 100), trial("fsdp", 8, 150)])
    assert (eight.speed_up, eight.efficiency) == (pytest.approx(1.5), pytest.approx(0.75))


def test_what_could_not_be_measured_is_left_out() -> None:
    images = [trial("ddp", n, 100.0 * n, tokens_per_s=None, mfu=None, communication=None) for n in (1, 2)]
    found = document("digits", 40, images)
    assert json.loads(json.dumps(found)) == {
        **found,
        "rows": [{**row, "spread": list(row["spread"])} for row in found["rows"]],
    }
    assert found["unit"] == "samples"
    assert [(row["rate"], row["mfu"], row["communication"]) for row in found["rows"]] == [
        (10, None, None),
        (20, None, None),
    ]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw(table(TRIALS), "tokens", "lm, 40 steps", tmp_path / "scaling.png")
    content = (tmp_path / "scaling.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 10_000
    with pytest.raises(RequestError, match="cannot be written"):
        draw(table(TRIALS), "tokens", "lm", tmp_path / "nowhere" / "scaling.png")
