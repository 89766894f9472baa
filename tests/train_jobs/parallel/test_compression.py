"""Communication hooks: losses near those of whole gradients, and what PowerSGD remembers over a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, run_program, run_ranks, tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data

STEPS = 60
REAL = {
    "model": {"hidden_size": 128, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 2048},
    "data": {"source": "python-stdlib", "sequence_length": 128},
    "batch": {"global": 16, "micro": 8},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 10},
    "steps": 200,
}
POWERSGD = {"compression": "powersgd", "powersgd_rank": 2, "powersgd_warmup_steps": 5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


def job(corpus: Path, **ddp: Any) -> TrainJobConfig:
    checkpoint = {"every_steps": 20}
    optimizer = {"learning_rate": 3e-3}
    return tiny_job(corpus, parallel={"ddp": ddp}, steps=STEPS, checkpoint=checkpoint, optimizer=optimizer)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    metrics = run_ranks(job(corpus), tmp_path_factory.mktemp("whole"), 2)
    return [line["loss"] for line in metrics]


@pytest.mark.parametrize(
    ("ddp", "bound"),
    # A rounded gradient is off by 2^-11 (fp16) or 2^-8 (bf16) of itself; a matrix of low rank by much more,
    # which the next steps make up for.
    [
        pytest.param({"compression": "fp16"}, 0.01, marks=pytest.mark.slow),
        pytest.param({"compression": "bf16"}, 0.05, marks=pytest.mark.slow),
        (POWERSGD, 0.5),
    ],
    ids=["fp16", "bf16", "powersgd"],
)
def test_losses_stay_near_those_of_whole_gradients(
    ddp: dict[str, Any], bound: float, corpus: Path, whole: list[float], tmp_path: Path
) -> None:
    losses = [line["loss"] for line in run_ranks(job(corpus, **ddp), tmp_path, 2)]
    if ddp is POWERSGD:
        assert losses[:5] == pytest.approx(whole[:5], abs=1e-5), "the warm-up is not whole"
        assert losses[8] != pytest.approx(whole[8], abs=1e-5), "nothing was compressed"
    assert losses != whole
    assert max(abs(a - b) for a, b in zip(losses, whole, strict=True)) < bound
    assert losses[-1] < losses[0] - 0.5


def restart(config_json: str, run: str) -> None:
    """Save in the middle of compressed training, restore, and step on; rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    config = TrainJobConfig.model_validate_json(config_json)
    before = assemble(config, Path(run))
    for _ in range(20):
        before.loop.step()
    before.saver.save()
    before.saver.finish()
    after = assemble(config, Path(run))
    assert after.begin() == 20
    one, other = before.parallel.own_state(), after.parallel.own_state()
    assert one["error"], "nothing was compressed before the restart"
    assert one["steps"] == other["steps"] == 20
    for name in ("error", "p", "q"):
        assert one[name].keys() == other[name].keys()
        assert all(torch.equal(one[name][index], other[name][index]) for index in one[name]), name
    losses = {"whole": [], "again": []}
    for name, assembly in (("whole", before), ("again", after)):
        assembly.loop.reporter.metric = lambda line, found=losses[name]: found.append(line["loss"]) or False
        for _ in range(10):
            assembly.loop.step()
    if dist.get_rank() == 0:
        (Path(run) / "losses.json").write_text(json.dumps(losses))


@pytest.mark.slow
def test_powersgd_goes_on_with_what_it_had_lost(corpus: Path, tmp_path: Path) -> None:
    config = job(corpus, **POWERSGD)
    prepare_data(config, tmp_path / "data")
    run_program(restart, tmp_path, 2, config.model_dump_json(), str(tmp_path))
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["again"][0] == pytest.approx(losses["whole"][0], abs=1e-6)
    # Two steps after a restart travel whole: the runs part a little, no more.
    assert losses["again"] == pytest.approx(losses["whole"], abs=0.1)


def measure(config_json: str, run: str) -> None:
    """Train to the last step and count what goes over the loopback device meanwhile, of all ranks."""
    import torch.distributed as dist

    config = TrainJobConfig.model_validate_json(config_json)
    assembly = assemble(config, Path(run))
    marks = {}
    for step in range(config.steps):
        if step in (50, 150):
            marks[step] = _loopback_bytes()
        assembly.loop.step()
    evaluation = assembly.loop.evaluate()
    if dist.get_rank() == 0:
        bytes_per_step = (marks[150] - marks[50]) / 100 / dist.get_world_size()
        figures = {"bytes": bytes_per_step, "held_out": evaluation["loss"]}
        figures["parameters"] = sum(each.numel() for each in assembly.parallel.module.parameters())
        (Path(run) / "figures.json").write_text(json.dumps(figures))


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hooks_send_less_and_learn_as_much(tmp_path: Path) -> None:
    """Bytes sent by a rank in a step, and the loss after 200 steps on real text, beside whole gradients."""
    # From here on nothing else may use the loopback device.
    cases: dict[str, tuple[dict[str, Any], float, float]] = {
        # Settings, the share of the bytes that it sends at most, the bound on the held-out loss.
        "none": ({}, 1.0, 0.0),
        "fp16": ({"compression": "fp16"}, 0.52, 0.005),
        "bf16": ({"compression": "bf16"}, 0.52, 0.01),
        "powersgd, rank 1": ({**POWERSGD, "powersgd_rank": 1, "powersgd_warmup_steps": 20}, 0.02, 0.18),
        "powersgd, rank 4": ({**POWERSGD, "powersgd_rank": 4, "powersgd_warmup_steps": 20}, 0.06, 0.06),
    }
    found = {}
    for name, (ddp, _, _) in cases.items():
        config = TrainJobConfig.model_validate({**REAL, "parallel": {"strategy": "ddp", "ddp": ddp}})
        run = tmp_path / name.replace(", ", "-")
        prepare_data(config, run / "data")
        run_program(measure, run, 2, config.model_dump_json(by_alias=True), str(run))
        found[name] = json.loads((run / "figures.json").read_text())
    whole = found["none"]
    print("\n| hook | bytes of a rank in a step | share | held-out loss after 200 steps | difference |")
    print("|---|---|---|---|---|")
    for name, each in found.items():
        share, off = each["bytes"] / whole["bytes"], each["held_out"] / whole["held_out"] - 1
        print(f"| {name} | {each['bytes']:,.0f} | {share:.1%} | {each['held_out']:.4f} | {off:+.2%} |")
    # An all-reduce of two ranks sends each gradient once from each rank.
    assert whole["bytes"] == pytest.approx(4 * whole["parameters"], rel=0.02)
    for name, (_, share, bound) in cases.items():
        assert found[name]["bytes"] <= share * whole["bytes"], name
        assert abs(found[name]["held_out"] / whole["held_out"] - 1) <= bound, name
