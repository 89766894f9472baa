"""How far a script is, from what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_jobs.rank.script_progress import ScriptProgress, ScriptStep, Stillness, fingerprint

NANO = r"iter (?P<step>\d+): loss (?P<loss>[\d.]+)"
TRAINER = r"^\s*\d+%\|.*?\| (?P<step>\d+)/(?P<steps>\d+) \[|'loss': '?(?P<loss>[\d.]+)"


def test_lines_of_a_script() -> None:
    progress = ScriptProgress(NANO)
    assert progress.read("tokens per iteration\niter 0: loss 10.9, time 1 ms\niter") == ScriptStep(
        0, None, 10.9
    )
    assert progress.read(" 10: loss 9.5\niter 20: loss nan.\n") == ScriptStep(10, None, 9.5)
    assert progress.read("step 20: train loss 9\n") is None
    assert progress.read("iter 30: loss 1.2.3\n") == ScriptStep(30, None, None)


def test_a_bar_that_draws_itself_again_and_the_loss_on_a_line_of_its_own() -> None:
    progress = ScriptProgress(TRAINER)
    weights = "Loading weights: 100%|####| 291/291 [00:00<00:00, 9.9it/s]\n"
    assert progress.read(weights) is None
    bar = "\r 10%|#         | 20/200 [00:03<00:30,  5.9it/s]"
    assert progress.read("\r  0%|          | 0/200 [00:00<?, ?it/s]" + bar) == ScriptStep(0, 200)
    assert progress.read("\r 10%|#  | 21/200 [00:03<00:30]") == ScriptStep(20, 200)
    assert progress.read("\n{'loss': '2.345', 'epoch': 0.1}\n") == ScriptStep(21, 200)
    evaluation = "\r  0%|  | 0/500 [00:00]\r 50%|#####| 250/500 [00:00]\r100%|##| 500/500 [00:01]\n"
    assert progress.read(evaluation) is None, "a bar of its own"
    assert progress.read("\r 11%|#  | 22/200 [00:03<00:30]\n") == ScriptStep(22, 200, 2.345)
    assert progress.read("\r 11%|#  | 22/200 [00:03<00:30]\n") is None, "it is no news"


@given(st.text("iter 0123456789:los.\r\n", max_size=200), st.lists(st.integers(0, 30), max_size=9))
def test_it_does_not_matter_how_the_output_is_cut(text: str, cuts: list[int]) -> None:
    whole, parts = ScriptProgress(NANO), ScriptProgress(NANO)
    rest, found = text + "\n", []
    for cut in cuts:
        found.append(parts.read(rest[:cut]))
        rest = rest[cut:]
    found.append(parts.read(rest))
    assert whole.read(text + "\n") == next((step for step in reversed(found) if step is not None), None)


def test_parts_of_a_step_are_none() -> None:
    progress = ScriptProgress("epoch (?P<step>[0-9.]+)")
    assert progress.read("epoch 0.5\nepoch 0.75\n") == ScriptStep(0)
    assert progress.read("epoch 0.9\n") is None
    assert progress.read("epoch 1.25\n") == ScriptStep(1)


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    progress = ScriptProgress(NANO)
    for _ in range(100):
        progress.read("x" * 100_000)
    assert len(progress._unfinished) <= 65_536


def test_stillness_is_judged_by_the_start_until_a_step_was_named() -> None:
    still = Stillness(start_s=100.0, step_s=10.0, now=0.0)
    still.moved(5.0)
    assert still.hang(105.0) is None
    assert still.hang(105.1) == "has printed and saved nothing for 100 s, and has named no step yet"
    still.moved(200.0, step=True)
    assert still.hang(210.0) is None
    assert still.hang(210.1) == "has printed and saved nothing for 10 s"
    still.moved(211.0)
    assert still.hang(221.0) is None


def test_a_fingerprint_changes_with_every_write(tmp_path: Path) -> None:
    seen = [fingerprint(tmp_path / "nowhere"), fingerprint(tmp_path)]
    assert seen == [(0, 0, 0)] * 2
    file = tmp_path / "sub" / "model.pt"
    file.parent.mkdir()
    for content in ("a", "b", "ab"):
        file.write_text(content)
        seen.append(fingerprint(tmp_path))
    (tmp_path / "gone").symlink_to("nowhere")
    assert fingerprint(tmp_path) == seen[-1]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("text", ["1,234", " 7 "])
def test_numbers_as_people_print_them(text: str) -> None:
    assert ScriptProgress("step (?P<step>.*)").read(f"step {text}\n") == ScriptStep(
        int(text.replace(",", ""))
    )
