"""Whatever is done to the files of a checkpoint, no wrong state is ever loaded."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from tests.train_jobs.checkpoint.test_checkpoint_matrix import digests, write
from tests.train_jobs.ranks import assemble, run_program, tiny_job, write_corpus
from train_jobs.checkpoint.manifest import COMMIT_MARKER
from train_jobs.checkpoint.restore import restore
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.data.preparation import prepare_data


def save_two(config_json: str, run: str, out: str) -> None:
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    found = {}
    for _ in range(2):
        for _ in range(4):
            assembly.loop.step()
        assembly.saver.save()
        assembly.saver.finish()
        found[assembly.state.step] = digests(assembly)
    write(out, [found])


def damage_and_load(config_json: str, run: str, out: str, tries: int) -> None:
    """Damage the newer checkpoint at random, load, say what was loaded and why; again and again."""
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    chance = random.Random(7)
    checkpoints = Path(run) / "checkpoints"
    newest = checkpoints / "step-00000008"
    kept = Path(run) / "kept"
    shutil.copytree(newest, kept)
    names = sorted(path.name for path in newest.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", COMMIT_MARKER]
    results: list[dict[str, Any]] = []
    for attempt in range(tries):
        name = names[attempt % len(names)]
        how = chance.choice(("flip a bit", "flip a bit", "fill with zeros", "cut", "append", "delete"))
        spoil(newest / name, how, chance)
        reasons: list[str] = []

        def event(kind: str, reasons: list[str] = reasons, **facts: Any) -> None:
            reasons.append(f"{kind} {facts['step']}: {facts['reason']}")

        store = CheckpointStore(Storage(checkpoints))
        step = restore(store, assembly.state, event, has_saved=lambda: True)
        if attempt < 2 * len(names):  # each file, damaged twice: a later start says nothing about it
            assert restore(store, assembly.state, event, has_saved=lambda: True) == step
        results.append(
            {"file": name, "how": how, "step": step, "reasons": reasons, "digests": digests(assembly)}
        )
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(kept, newest)
    write(out, results)


def spoil(path: Path, how: str, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if how == "flip a bit":
        content[place] ^= 1 << chance.randrange(8)
    elif how == "fill with zeros":
        length = min(len(content) - place, chance.randrange(1, 5000))
        content[place : place + length] = bytes(length)
    elif how == "cut":
        del content[place:]
    elif how == "append":
        content += bytes(chance.randrange(256) for _ in range(chance.randrange(1, 50)))
    else:
        path.unlink()
        return
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("asynchronous", "tries"),
    [
        (False, 10),
        *(pytest.param(asynchronous, 200, marks=pytest.mark.slow) for asynchronous in (False, True)),
    ],
)
def test_damage_of_any_kind_leads_to_the_checkpoint_before_it(
    asynchronous: bool, tries: int, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet")
    checkpoint = {"every_steps": 100, "asynchronous": asynchronous}
    config = tiny_job(corpus, steps=20, parallel={"strategy": "fsdp"}, checkpoint=checkpoint)
    run = tmp_path / "run"
    prepare_data(config, run / "data")
    saved = tmp_path / "saved.json"
    run_program(save_two, run, 2, config.model_dump_json(), str(run), str(saved))
    (states,) = json.loads(saved.read_text())
    loaded = tmp_path / "loaded.json"
    run_program(damage_and_load, run, 1, config.model_dump_json(), str(run), str(loaded), tries)
    results = json.loads(loaded.read_text())
    assert len(results) == tries
    harmless = 0
    for result in results:
        assert result["digests"] == states[str(result["step"])], result
        if result["step"] == 8:  # a space of the manifest is another space: nothing was said otherwise
            harmless += 1
            assert result["file"] == COMMIT_MARKER
        elif result["how"] == "delete" and result["file"] == COMMIT_MARKER:
            assert result["reasons"] == [], "without its marker it never was one"
        else:
            (reason,) = result["reasons"]
            assert reason.startswith("checkpoint_rejected 8: ")
            assert result["file"] in reason
    assert harmless < tries / 10
