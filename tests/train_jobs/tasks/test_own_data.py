"""Data of a task of the user's: what its collate makes of it, and what is refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train_jobs.ranks import reports
from tests.train_jobs.tasks.own_tasks import Outcome, steps, train_all
from train_jobs.driver.failures import FailureClass

WORDS = ["a", "shoal", "of", "fish", "turns", "as", "one", "when"]
HELD_OUT = ["the", "wave", "comes", "over", "reefs"]

TEXTS = f"""
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from train_jobs.tasks import Sums


class Texts(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


class Stream(IterableDataset):
    def __init__(self, texts):
        self.texts = texts

    def __iter__(self):
        return iter(self.texts)


class Task:
    unit = "tokens"

    def __init__(self, config): ...

    def build(self):
        return nn.Linear(1, 1)

    def samples(self, held_out):
        return Texts({HELD_OUT} if held_out else {WORDS})

    def collate(self, samples):
        longest = max(map(len, samples))
        codes = [[*map(ord, each), *[0] * (longest - len(each))] for each in samples]
        return {{"codes": torch.tensor(codes)}}

    def loss(self, model, batch):
        codes = batch["codes"][batch["codes"] > 0]
        loss = (model(codes[:, None] / 100.0) - 1).square().sum()
        return Sums(loss, len(codes), {{"code": codes.sum()}})
"""


def test_a_tasks_own_collate_makes_the_batches_of_training_and_of_evaluation(tmp_path: Path) -> None:
    modules = {"indexed": TEXTS, "stream": TEXTS.replace("return Texts(", "return Stream(")}
    outcomes = train_all(tmp_path, modules, evaluate={"every_steps": 2})
    assert outcomes == {"indexed": Outcome(3), "stream": Outcome(3)}
    letters = "".join(HELD_OUT)
    for name in modules:
        # A global batch is all of the words, in whatever order.
        assert [line["tokens"] for line in steps(tmp_path / name)] == [len("".join(WORDS))] * 3
        evaluations = [line for line in reports(tmp_path / name) if line.get("kind") == "evaluated"]
        assert [line["step"] for line in evaluations] == [2, 3]
        for line in evaluations:
            assert line["tokens"] == len(letters)
            assert line["code"] == pytest.approx(sum(map(ord, letters)) / len(letters))


SAMPLES = """
import torch
from torch import nn
from train_jobs.tasks import Sums


class Task:
    def __init__(self, config): ...

    def build(self):
        return nn.Linear(1, 1)

    def samples(self, held_out):
        return [SAMPLE for index in range(16)]

    def loss(self, model, batch):
        return Sums(model(torch.ones(1)).sum(), 1)
"""


def test_samples_that_cannot_be_put_together_end_the_job_before_its_first_step(tmp_path: Path) -> None:
    given = {
        "unequal": '{"index": index, "tokens": torch.ones(index + 1)}',
        "unequal_lists": '{"index": index, "tokens": [1] * (index + 1)}',
        "strings": '{"index": index, "text": "words"}',
        "nothing": '{"index": index, "text": None}',
    }
    outcomes = train_all(
        tmp_path,
        {name: SAMPLES.replace("SAMPLE ", f"{sample} ") for name, sample in given.items()},
        evaluate={"every_steps": None},
    )
    for name, outcome in outcomes.items():
        assert (outcome.steps, outcome.failure_class) == (0, FailureClass.REQUEST), name
        assert outcome.error is not None
        key = "text" if "text" in given[name] else "tokens"
        assert outcome.error.startswith(f"list: `{key}` "), outcome
        assert "a method collate(samples)" in outcome.error
        assert "\n" not in outcome.error
    assert "has other shapes from sample to sample" in (outcomes["unequal"].error or "")
    assert "`text` is str; a sample is a dict of tensors" in (outcomes["strings"].error or "")


def test_a_task_without_a_sample_to_train_on_is_refused(tmp_path: Path) -> None:
    empty = SAMPLES.replace("range(16)", "range(0)").replace("SAMPLE ", "{} ")
    stream = TEXTS.replace(f"return Texts({HELD_OUT} if held_out else {WORDS})", "return Stream([])")
    assert stream != TEXTS
    outcomes = train_all(tmp_path, {"empty": empty, "stream": stream}, evaluate={"every_steps": None})
    refused = Outcome(0, "the task gives no sample to train on", FailureClass.REQUEST)
    assert outcomes == {"empty": refused, "stream": refused}
