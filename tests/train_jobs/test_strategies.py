"""DDP and FSDP on real processes against a single-process run, and going on from checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train_jobs.ranks import held_out_loss, reports, run_ranks, start_ranks, tiny_job, write_corpus
from train_jobs.data.documents import read_documents

# The ranks sum the same fp32 numbers in another order: each of the eight steps may differ by a few units in
# the last place of a loss near 6 (4.8e-7 each), and the differences feed back through the weights.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    run = tmp_path_factory.mktemp("alone")
    return run_ranks(tiny_job(corpus), run, world_size=1), run


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [line for line in reports(run) if line.get("kind") == "evaluated"]


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4)])
def test_many_ranks_step_like_one(
    strategy: str, world_size: int, corpus: Path, alone: tuple[list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    metrics = run_ranks(tiny_job(corpus, parallel={"strategy": strategy}), tmp_path, world_size)
    reference, reference_run = alone
    assert [line["step"] for line in metrics] == list(range(1, 9))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [line[key] for line in metrics] == pytest.approx(
            [line[key] for line in reference], abs=TOLERANCE, rel=TOLERANCE
        ), key
    assert [(line["samples"], line["tokens"]) for line in metrics] == [(8, 128)] * 8
    for mine, theirs in zip(evaluations(tmp_path), evaluations(reference_run), strict=True):
        assert (mine["step"], mine["tokens"]) == (theirs["step"], theirs["tokens"])
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)


def test_one_process_steps_like_plain_torch(corpus: Path, alone: tuple[list[dict[str, Any]], Path]) -> None:
    """The oracle: transformers' own loss, torch's own AdamW and clipping, a whole global batch at once."""
    import numpy as np
    import torch

    from train_jobs.tasks.causal_lm import CausalLM

    metrics, run = alone
    config = tiny_job(corpus)

    tokens = torch.from_numpy(np.load(run / "data" / "train.npy").astype("int64"))
    num_samples = (len(tokens) - 1) // 16
    order = np.random.default_rng([1, 0]).permutation(num_samples)
    model = CausalLM(config, run / "data").build()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step, line in enumerate(metrics):
        windows = torch.stack([tokens[i * 16 : i * 16 + 17] for i in order[step * 8 : step * 8 + 8]])
        logits = model(input_ids=windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = 1e-2 * ((step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 6)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        assert line["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert line["learning_rate"] == pytest.approx(rate)


def test_the_exported_model_has_the_loss_that_the_evaluation_said(
    corpus: Path, alone: tuple[list[dict[str, Any]], Path]
) -> None:
    import numpy as np
    from transformers import AutoTokenizer

    _, run = alone
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    texts = [document.text for document in read_documents(tiny_job(corpus).data) if document.held_out]
    text = "".join(f"{text}{tokenizer.eos_token}" for text in texts)
    stream = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
    loss, tokens = held_out_loss(run / "export", stream, 16)
    last = evaluations(run)[-1]
    assert (last["step"], last["tokens"]) == (8, tokens)
    assert last["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert last["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize(("strategy", "asynchronous"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_a_killed_run_goes_on_from_its_checkpoint_bit_for_bit(
    strategy: str, asynchronous: bool, corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(
        corpus,
        steps=60,
        parallel={"strategy": strategy},
        checkpoint={"every_steps": 3, "asynchronous": asynchronous},
        evaluate={"every_steps": None},
    )
    undisturbed = run_ranks(config, tmp_path / "undisturbed", 2)

    run = tmp_path / "killed"
    processes = start_ranks(config, run, 2)
    wait_for(lambda: (run / "checkpoints" / "step-00000003" / "committed.json").exists(), processes)
    processes[1].kill()
    for process in processes:
        process.wait(60)
    assert not (run / "export").exists(), "the run ended before it was killed"
    again = run_ranks(config, run, 2, attempt=2)
    assert again[0]["step"] > 3
    losses = {line["step"]: line["loss"] for line in reports(run) if "kind" not in line}
    assert losses == {line["step"]: line["loss"] for line in undisturbed}


def wait_for(condition: Callable[[], bool], processes: list[Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.exit_code in (None, 0) for process in processes)
        time.sleep(0.002)
