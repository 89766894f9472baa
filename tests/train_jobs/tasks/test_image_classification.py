"""A ResNet on scikit-learn's digits: what it learns, and that evaluation counts every image once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import reports, run_ranks
from train_jobs.data.images import open_images


def job(**changes: Any) -> TrainJobConfig:
    return TrainJobConfig.model_validate(
        {
            "task": "image_classification",
            "model": {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]},
            "data": {"held_out_every": 5, "image_size": 32, "augment": {"crop_padding": 3}},
            "batch": {"global": 64, "micro": 16},
            "optimizer": {"name": "sgd", "learning_rate": 0.1, "weight_decay": 5e-4, "warmup_steps": 10},
            "steps": 160,
            "evaluate": {"every_steps": 80},
            "checkpoint": {"every_steps": 80},
            **changes,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_digits_are_learned_and_counted_once(strategy: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    config = job(parallel={"strategy": strategy})
    metrics = run_ranks(config, tmp_path, 2)
    last = [line for line in reports(tmp_path) if line.get("kind") == "evaluated"][-1]
    assert last["accuracy"] >= 0.97
    assert (metrics[-1]["samples"], metrics[-1]["tokens"]) == (64, None)

    # The oracle: transformers loads the export by itself and looks at each held-out image once.
    samples = open_images(config, tmp_path / "data", held_out=True)
    assert last["samples"] == len(samples) == 359
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "export").eval()
    assert model.config.id2label == {index: str(index) for index in range(10)}
    assert AutoImageProcessor.from_pretrained(tmp_path / "export").size == {"shortest_edge": 32}
    batch = samples.batch(range(len(samples)), None)
    with torch.no_grad():
        logits = model(pixel_values=batch["pixel_values"]).logits
    right = (logits.argmax(dim=-1) == batch["labels"]).sum().item()
    assert last["accuracy"] == pytest.approx(right / len(samples))
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
    assert last["loss"] == pytest.approx(loss.item(), abs=1e-5)
