"""A model whose steps do not use all of its parameters: it is saved, and comes back as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, finish, reports, some_steps, start_program
from tests.train_jobs.tasks.test_custom_task import EXAMPLE
from tests.train_jobs.tasks.test_custom_task import job as example_job

SOMETIMES = """
    def forward(self, inputs):
        hidden = self.rnn(self.embedding(inputs))[0]
        self.calls += self.training
        return self.head(self.spare(hidden) if self.calls > {from_call} else hidden)
"""
SPARE = "        self.spare = nn.Linear(width, width)\n        self.calls = 0\n"
NEVER = 10**9


def module(from_call: int) -> str:
    """The documentation's task with a layer more, which is used from a forward pass on."""
    before, _, after = EXAMPLE.partition("\n    def forward(self, inputs):\n")
    _, rest = after.split("\n", 1)
    return f"{before}{SPARE}{SOMETIMES.format(from_call=from_call)}{rest}"


def job(**changes: Any) -> TrainJobConfig:
    return example_job(
        **{"steps": 8, "evaluate": {"every_steps": None}, "checkpoint": {"every_steps": 100}, **changes}
    )


def train(
    directory: Path, config: TrainJobConfig, run: str, world_size: int, *until: int
) -> dict[int, float]:
    for attempt, step in enumerate(until, 1):
        arguments = (str(directory), config.model_dump_json(), str(directory / run), step, attempt)
        finish(start_program(some_steps, directory / run, world_size, *arguments))
    return {line["step"]: line["loss"] for line in reports(directory / run) if "kind" not in line}


UNUSED: dict[str, tuple[dict[str, Any], int]] = {
    "alone": ({"strategy": "ddp", "ddp": {"find_unused_parameters": True}}, 1),
    "ddp": ({"strategy": "ddp", "ddp": {"find_unused_parameters": True}}, 2),
    "zero1": ({"strategy": "zero1", "ddp": {"find_unused_parameters": True}}, 2),
    "fsdp": ({"strategy": "fsdp"}, 2),
    "zero3": ({"strategy": "zero3"}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSED)
def test_a_parameter_without_gradient_is_no_reason_not_to_come_back(name: str, tmp_path: Path) -> None:
    parallel, world_size = UNUSED[name]
    (tmp_path / "my_task.py").write_text(module(NEVER))
    config = job(parallel=parallel)
    undisturbed = train(tmp_path, config, "undisturbed", world_size, 8)
    again = train(tmp_path, config, "again", world_size, 3, 8)
    assert len(again) == 8
    assert again == undisturbed
    (told,) = (line for line in reports(tmp_path / "again") if line.get("kind") == "optimizer_state_missing")
    assert (told["step"], told["parameters"]) == (3, 2)
    assert "spare.weight" in told["reason"]


def one_process(directory: str, config_json: str, run: str) -> None:
    """Go back on an optimizer that knows more than the checkpoint; take from one that knows less."""
    import torch

    from train_jobs.checkpoint.restore import restore

    sys.path.insert(0, directory)
    config = TrainJobConfig.model_validate_json(config_json)
    assembly, newcomer = (assemble(config, Path(run)) for _ in range(2))
    assembly.begin()
    spare = assembly.parallel.stepped.spare.weight
    for _ in range(3):
        assembly.loop.step()
    assembly.saver.save()
    assembly.saver.finish()
    kept = {name: value.clone() for name, value in assembly.parallel.stepped.state_dict().items()}
    assert spare not in assembly.state.optimizer.state

    newcomer.state.take(assembly.state.handed_on())
    assert newcomer.state.step == 3
    for name, value in newcomer.parallel.stepped.state_dict().items():
        assert torch.equal(value, kept[name])
    fresh = newcomer.state.optimizer.state[newcomer.parallel.stepped.spare.weight]
    assert all(not torch.count_nonzero(torch.as_tensor(value)) for value in fresh.values())

    for _ in range(3):
        assembly.loop.step()
    late = assembly.state.optimizer.state[spare]
    assert late["step"] == 3
    assert torch.count_nonzero(late["exp_avg"])
    newcomer.state.take(assembly.state.handed_on())  # of one that has it meanwhile
    taken = newcomer.state.optimizer.state[newcomer.parallel.stepped.spare.weight]
    assert torch.equal(taken["exp_avg"], late["exp_avg"])

    events: list[str] = []
    step = restore(
        assembly.store, assembly.state, lambda kind, **_: events.append(kind), has_saved=lambda: True
    )
    assert (step, events) == (3, ["optimizer_state_missing"])
    again = assembly.state.optimizer.state[spare]
    assert all(not torch.count_nonzero(torch.as_tensor(value)) for value in again.values())
    for name, value in assembly.parallel.stepped.state_dict().items():
        assert torch.equal(value, kept[name])


def test_what_is_kept_of_a_parameter_goes_with_the_state_that_it_belongs_to(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(module(from_call=12))
    config = job(parallel={"ddp": {"find_unused_parameters": True}})
    arguments = (str(tmp_path), config.model_dump_json(), str(tmp_path / "run"))
    finish(start_program(one_process, tmp_path / "run", 1, *arguments))


def refused_by_torch(directory: str, config_json: str, run: str) -> None:
    """Write down how a failure is told that torch finds in the second step."""
    from train_jobs.driver.failures import classify
    from train_jobs.group.outcome import RankFailure

    sys.path.insert(0, directory)
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    assembly.begin()
    try:
        assembly.loop.run()
    except RuntimeError as error:
        failure = classify([RankFailure(0, 1, "RuntimeError", str(error), "")], ["n"], {"n"}, {})
        (Path(run) / "failure.txt").write_text(f"{failure.failure_class}\n{failure.reason}")


def test_torchs_own_words_are_followed_by_the_key_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(module(NEVER))
    arguments = (str(tmp_path), job().model_dump_json(), str(tmp_path / "run"))
    finish(start_program(refused_by_torch, tmp_path / "run", 1, *arguments))
    told = (tmp_path / "run" / "failure.txt").read_text()
    assert told.startswith("code\nRuntimeError: Expected to have finished reduction")
    assert told.endswith("(here: parallel.ddp.find_unused_parameters: true)")
