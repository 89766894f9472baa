"""A DeepSpeed config beside the job's own: what contradicts it or cannot be read is said, at its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config.reading.deepspeed_settings import complete_settings
from cluster.config.sections.train import TrainJobConfig
from tests.cluster.config.config_files import load, mistakes, position


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.config.checks.engine_checks.find_spec", lambda name: object())


def text(job: str, settings: str = "{}") -> str:
    return f"train_jobs:\n  j:\n    parallel: {{engine: deepspeed, deepspeed: {settings}}}\n    {job}\n"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{train_batch_size: 16}", "says train_batch_size: 16, the job 32 (batch.global); `auto` takes"),
        ("{train_micro_batch_size_per_gpu: 4}", "the job 8 (batch.micro)"),
        ("{gradient_accumulation_steps: 1}", "the job 2 (batch.global / (batch.micro × workers))"),
        ("{gradient_clipping: 0.5}", "says gradient_clipping: 0.5, the job 1.0 (optimizer.max_grad_norm)"),
        ("{bf16: {enabled: true}}", "says bf16.enabled: true, the job false (precision)"),
        (
            "{optimizer: {type: Adam, params: {lr: 1}}}",
            "says optimizer.params.lr: 1, the job 0.003 (optimizer.learning_rate)",
        ),
        ("{optimizer: {params: {betas: [0.9, 0.999]}}}", "optimizer.params.betas: [0.9, 0.999], the job"),
        ("{scheduler: {type: WarmupLR}}", "should have no `scheduler`: the learning rate follows"),
        ("{fp16: true}", "should have a mapping as its `fp16`, was true"),
        ("{optimizer: {params: 3}}", "should have a mapping as its `optimizer.params`, was 3"),
        ("[1]", "should be a DeepSpeed config: a mapping, or the path of its JSON file; was [1]"),
        ("5", "should be a DeepSpeed config: a mapping, or the path of its JSON file; was 5"),
        ("null", "should be a DeepSpeed config: a mapping, or the path of its JSON file"),
        ("nowhere.json", "nowhere.json` does not exist"),
        ("broken.json", "broken.json` is no JSON: line 1, column 7: Expecting value"),
        ("list.json", "list.json` is no DeepSpeed config: it should hold one JSON object"),
        ("binary.json", "binary.json` is no JSON"),
        (".", "` cannot be read (Is a directory)"),
        ("other.json", "says train_batch_size: 8, the job 32 (batch.global)"),
    ],
)
def test_a_config_of_deepspeed_that_does_not_fit(settings: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"a": }')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.json").write_text('{"train_batch_size": 8}')
    config = text("workers: {min: 2}", settings)
    (found,) = mistakes(tmp_path, config)
    assert found.path == "train_jobs.j.parallel.deepspeed"
    marker = "deepspeed: null" if settings == "null" else f"{settings}}}\n"
    assert (found.line, found.column) == position(config, marker)
    assert words in found.message


@pytest.mark.parametrize(
    ("job", "path", "words"),
    [
        ("workers: {max: 2}", "workers.max", "should be workers.min (1) under parallel.engine deepspeed"),
        ("data: {packing: false}", "data.packing", "should be true under parallel.engine deepspeed"),
    ],
)
def test_what_a_job_cannot_ask_of_deepspeed(job: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, text(job))
    assert found.path == f"train_jobs.j.{path}"
    assert words in found.message


@pytest.mark.parametrize("key", ["strategy: fsdp", "tensor: 2", "compile: true", "offload: true"])
def test_keys_of_torchs_engine_have_no_effect(key: str, tmp_path: Path) -> None:
    parallel = f"{{engine: deepspeed, deepspeed: {{}}, {key}}}"
    config = f"train_jobs: {{j: {{workers: {{min: 2}}, parallel: {parallel}}}}}\n"
    name, value = key.split(": ")
    found = {mistake.path: mistake.message for mistake in mistakes(tmp_path, config)}
    assert f"has no effect under parallel.engine deepspeed, whose config says it; was {value}" in str(
        found[f"train_jobs.j.parallel.{name}"]
    )


def test_deepspeed_has_to_be_asked_for_and_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = mistakes(tmp_path, "train_jobs: {j: {parallel: {deepspeed: {}}}}\n")
    assert "has a meaning under parallel.engine deepspeed only, not under torch" in found.message
    monkeypatch.setattr("cluster.config.checks.engine_checks.find_spec", lambda name: None)
    (found,) = mistakes(tmp_path, text("steps: 1"))
    assert found.message == "needs DeepSpeed: pip install 'shoal[deepspeed]'"


def test_a_file_is_read_into_the_job_and_completed_by_it(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "wall_clock_breakdown": False,
    }
    (tmp_path / "ds.json").write_text(json.dumps(given))
    loaded = load(tmp_path, text("workers: {min: 2}\n    precision: bf16", "ds.json"))
    job = loaded.resolved.train_jobs["j"]
    assert job.parallel.deepspeed == given
    assert TrainJobConfig.model_validate_json(job.model_dump_json(by_alias=True)) == job
    assert complete_settings(given, job, 2) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
        "wall_clock_breakdown": False,
    }
    assert given["train_batch_size"] == "auto"
