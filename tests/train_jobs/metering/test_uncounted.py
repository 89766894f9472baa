"""Models and losses whose operations cannot be counted: they train, and only lack the figure."""

from __future__ import annotations

from pathlib import Path

from tests.train_jobs.tasks.own_tasks import Outcome, steps, train_all

MODULE = """
import torch
from torch import nn
from torch.utils.data import Dataset
from train_jobs.tasks import Sums


class Strange(Exception):
    def __init__(self, what, where):
        super().__init__(f"{what} in {where}")


class Points(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 16)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = BODY
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        FORWARD
        return self.head(self.body(x))


class Task:
    def __init__(self, config):
        self.weights = None

    def build(self):
        return Model()

    def samples(self, held_out):
        return Points()

    def loss(self, model, batch):
        out = model(batch["x"])
        LOSS
        return Sums((out - 1).square().sum(), len(out))
"""
OWN_COLLATE = """
    def collate(self, samples):
        pairs = [torch.stack([samples[index]["x"], samples[index + 1]["x"]]).mean(0) for index in (0, 2)]
        return {"x": torch.stack(pairs)}
"""


def module(forward: str = "pass", body: str = "nn.Identity()", loss: str = "pass", more: str = "") -> str:
    return MODULE.replace("FORWARD", forward).replace("BODY", body).replace("LOSS", loss) + more


def test_a_model_that_cannot_be_counted_trains_and_only_has_no_mfu(tmp_path: Path) -> None:
    uncounted = {
        "norm_of_one_sample": (module(body="nn.BatchNorm1d(4)"), "ValueError: Expected more than 1 value"),
        "numpy": (module("x = x * float(x.detach().numpy().mean() < 9)"), ""),
        "item": (module("x = x * (x.sum().item() < 99)"), ""),
        "branch": (module("x = x + 1 if x.sum() < 99 else x"), ""),
        "own": (module("if x.is_meta:\n            raise Strange('nothing', 'x')"), "Strange: nothing in x"),
        "one_sample": (module(more=OWN_COLLATE), "IndexError: list index out of range"),
    }
    modules = {name: source for name, (source, _) in uncounted.items()}
    outcomes = train_all(tmp_path, {**modules, "counted": module()}, evaluate={"every_steps": None})
    assert outcomes == dict.fromkeys([*modules, "counted"], Outcome(3))
    for name in outcomes:
        lines = steps(tmp_path / name)
        assert [line["mfu"] is None for line in lines] == [name != "counted"] * 3, name
        assert all(line["samples_per_s"] > 0 and line["loss"] > 0 for line in lines)
        assert (tmp_path / name / "export" / "model.safetensors").exists()
    said = (tmp_path / "ranks" / "rank-0.log").read_text()
    assert said.count("operations cannot be counted, so that no MFU is known: ") == len(uncounted)
    for _, words in uncounted.values():
        assert f"so that no MFU is known: {words}" in said


def test_what_a_task_keeps_of_its_first_batch_is_none_that_was_only_counted(tmp_path: Path) -> None:
    keeps = """if self.weights is None:
            self.weights = torch.full((1,), 2.0, device=out.device)
        out = out * self.weights"""
    outcomes = train_all(tmp_path, {"keeps": module(loss=keeps)}, evaluate={"every_steps": None})
    assert outcomes == {"keeps": Outcome(3)}
    assert all(line["mfu"] is not None for line in steps(tmp_path / "keeps"))
