"""What ranks of a script printed, as a person follows it."""

from __future__ import annotations

from pathlib import Path

from cluster.files.storage import Storage
from infra.rank_output import RankOutput


def write(run: Path, attempt: int, rank: int, data: bytes) -> None:
    log = run / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(data)


def lines(output: RankOutput, last: bool = False) -> list[tuple[int, int, str]]:
    return [(line.attempt, line.rank, line.text) for line in output.new(last=last)]


def test_each_line_comes_once_and_whole(tmp_path: Path) -> None:
    output = RankOutput(Storage(tmp_path))
    assert lines(output) == [], "it prints nothing yet"
    write(tmp_path, 1, 0, "step 1\nst\u00e4".encode()[:-1])  # cut inside of a character
    write(tmp_path, 1, 1, b"other\n")
    assert lines(output) == [(1, 0, "step 1")]
    assert lines(output) == []
    write(tmp_path, 1, 0, "\u00e4rke\n".encode()[1:] + b"\xff\nrest")
    assert lines(output) == [(1, 0, "st\u00e4rke"), (1, 0, "\ufffd")]
    write(tmp_path, 2, 0, b"again\n")
    write(tmp_path, 10, 0, b"and again\n")
    assert lines(output) == [(2, 0, "again"), (10, 0, "and again")]
    assert lines(output, last=True) == [(1, 0, "rest")]


def test_all_ranks_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write(tmp_path, 1, rank, b"x\n")
    (tmp_path / "logs" / "attempt-1" / "rank-0-of-1-0.stack").write_text("a stack\n")
    assert lines(RankOutput(Storage(tmp_path), None)) == [(1, 0, "x"), (1, 2, "x"), (1, 10, "x")]
    assert lines(RankOutput(Storage(tmp_path), 2)) == [(1, 2, "x")]
