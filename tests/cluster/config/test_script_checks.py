"""Jobs of task `script`: what they run, where, and the keys that do nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.cluster.config.config_files import load, mistakes


def job(lines: str) -> str:
    return f"train_jobs: {{j: {{task: script, {lines}}}}}\n"


def found(directory: Path, lines: str) -> dict[str, str]:
    return {each.path.removeprefix("train_jobs.j."): each.message for each in mistakes(directory, job(lines))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "examples" / "package").mkdir(parents=True)
    (tmp_path / "examples" / "module.py").write_text("print(1)")
    (tmp_path / "examples" / "package" / "__main__.py").write_text("print(1)")
    (tmp_path / "run.sh").write_text("python train.py\n")
    (tmp_path / "run").write_text("#!/bin/bash\ntorchrun\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize(
    "lines",
    [
        "script: train.py",
        "script: examples/module.py, cwd: examples",
        "module: examples.module",
        "module: module, cwd: ./examples/",
        "module: package, cwd: examples",
        "module: lm_eval",  # of a package
        r"script: train.py, progress: 'iter (?P<step>\d+)/(?P<steps>\d+) (?P<loss>\S+)'",
        "script: train.py, env: {A: 1}, exclude: [x], recovery: {retry: any, memory_failures: 3}, publish: m",
    ],
)
def test_scripts_and_modules_that_can_run(folder: Path, lines: str) -> None:
    load(folder, job(lines))


def test_another_folder_may_travel(folder: Path) -> None:
    (folder / "conf").mkdir()
    for lines in ("script: train.py, working_dir: ..", f"module: module, working_dir: {folder}/examples"):
        load(folder / "conf", job(lines))
    (folder / "task.py").write_text("class Task:\n    def build(self): ...\n    samples = loss = build\n")
    config = load(folder / "conf", "train_jobs: {j: {task: 'task:Task', working_dir: ..}}\n")
    assert config.resolved.train_jobs["j"].folder(config.base) == folder
    (problem,) = mistakes(folder, "train_jobs: {j: {steps: 3, working_dir: train.py}}\n")
    assert (problem.path, "is no directory" in problem.message) == ("train_jobs.j.working_dir", True)


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        ("arguments: [a]", "script", "should name the script to run"),
        ("script: train.py, module: m", "module", "a job runs one of them"),
        ("script: nowhere.py", "script", "does not exist"),
        ("script: examples", "script", "is a directory"),
        ("script: ../train.py", "script", "which is what travels to the nodes; `working_dir`"),
        ("script: run.sh", "script", "is a shell script, and what runs is Python"),
        ("script: run", "script", "is a shell script, and what runs is Python"),
        ("script: broken.py", "script", "is no Python: invalid syntax (line 1)"),
        ("module: broken", "module", "is no Python: invalid syntax (line 1)"),
        ("module: examples", "module", "is a package without a __main__.py"),
        ("module: a/b", "module", ""),
        (
            "script: train.py, cwd: ..",
            "cwd",
            "which is what travels to the nodes; `working_dir`",
        ),
        ("script: train.py, working_dir: elsewhere", "working_dir", "does not exist"),
        ("script: train.py, working_dir: examples", "script", "does not exist"),
        ("script: train.py, cwd: train.py", "cwd", "is no directory"),
        ("script: train.py, cwd: elsewhere", "cwd", "does not exist"),
        ("script: train.py, progress: 'iter ('", "progress", "should be a regular expression"),
        ("script: train.py, progress: 'iter [0-9]+'", "progress", "should have a group `step`"),
        ("script: train.py, progress: '(?P<step>.)(?P<lr>.)'", "progress", "has a group `lr`"),
        ("script: train.py, workers: {min: 3, per_node: 2}", "workers.min", "a multiple of workers.per_node"),
    ],
)
def test_mistakes_are_found_before_anything_starts(folder: Path, lines: str, key: str, words: str) -> None:
    problems = found(folder, lines)
    assert list(problems) == [key]
    assert words in problems[key]


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("steps: 10", "steps"),
        ("seed: 2", "seed"),
        ("precision: bf16", "precision"),
        ("batch: {global: 64}", "batch.global"),
        ("model: {hidden_size: 64}", "model.hidden_size"),
        ("data: {sequence_length: 64}", "data.sequence_length"),
        ("optimizer: {name: sgd}", "optimizer.name"),
        ("parallel: {strategy: fsdp}", "parallel.strategy"),
        ("parallel: {tensor: 2}", "parallel.tensor"),
        ("parallel: {engine: deepspeed}", "parallel.engine"),
        ("parallel: {fsdp: {reduce_dtype: bf16}}", "parallel.fsdp.reduce_dtype"),
        ("workers: {group: 2}", "workers.group"),
        ("evaluate: {every_steps: 3}", "evaluate.every_steps"),
        ("checkpoint: {keep: 9}", "checkpoint.keep"),
        ("export: {precision: bf16}", "export.precision"),
        ("publish: m, publish_best: true", "publish_best"),
        ("recovery: {non_finite_loss: skip}", "recovery.non_finite_loss"),
        ("recovery: {loss_spike: {policy: warn}}", "recovery.loss_spike.policy"),
        ("recovery: {begin_anew: true}", "recovery.begin_anew"),
    ],
)
def test_every_key_without_an_effect_is_named(folder: Path, lines: str, key: str) -> None:
    message = "has no effect under task script: what is trained, and how, says the script"
    assert found(folder, f"script: train.py, {lines}") == {key: message}


def test_all_of_them_are_named_at_once(folder: Path) -> None:
    lines = "script: train.py, steps: 3, settings: {a: 1}, optimizer: {name: sgd, momentum: 0.5}"
    assert list(found(folder, lines)) == ["steps", "settings", "optimizer.name", "optimizer.momentum"]


@pytest.mark.parametrize("key", ["script: train.py", "module: m", "cwd: examples", "arguments: [x]"])
def test_what_only_scripts_have_is_no_key_of_other_tasks(folder: Path, key: str) -> None:
    (mistake,) = mistakes(folder, f"train_jobs: {{j: {{{key}}}}}\n")
    assert mistake.message == "has a meaning under task script only, not under task causal_lm"


def test_no_default_of_a_job_is_a_mistake_of_its_own() -> None:
    assert TrainJobConfig().script is None
