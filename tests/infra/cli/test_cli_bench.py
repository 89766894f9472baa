"""`shoal bench train`: what is wrong is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.cli.main import call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody"], "nobody"),
        (["lm", "--workers", "1,two"], "--workers '1,two': should be whole numbers above 0"),
        (["lm", "--workers", "0"], "--workers '0'"),
        (["lm", "--workers", "1,3"], "should be a multiple of batch.micro (8) × workers"),
        (["lm", "--strategies", "ddp,zero"], 'was "zero"'),
        (["lm", "--plot", "nowhere/x.png"], "nowhere is no directory to draw into"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_starts(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "shoal.yaml").write_text("cluster: {name: nobody-started-this}\ntrain_jobs: {lm: {}}\n")
    monkeypatch.chdir(tmp_path)
    assert call(["bench", "train", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "shoal-storage").exists()
