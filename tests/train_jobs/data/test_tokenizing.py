"""From documents to token streams part by part: cut off, gone on with, handed over, done by others."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.storage import Storage
from tests.train_jobs.ranks import WORDS, tiny_job
from tests.train_jobs.same_streams import assert_same
from train_jobs.data import tokenizing
from train_jobs.data.documents import CorpusPart, corpus_parts
from train_jobs.data.token_streams import Encoded, StreamWriter, TokenStreams
from train_jobs.data.tokenizing import LongWorkError, encode_here, write_streams
from train_jobs.data.tokens import prepare_tokens

GROUPS, ROWS = 12, 7


class CutOffError(Exception):
    """What a kill would have been."""


def corpus(path: Path, groups: int = GROUPS) -> Path:
    """Row groups of documents of many lengths; some rows are null, and of one group all are."""
    choose = random.Random(3)
    texts = [
        " ".join(choose.choices(WORDS.split(), k=choose.randrange(1, 300))) for _ in range(groups * ROWS)
    ]
    rows = [None if index % 11 == 5 or index // ROWS == 4 else text for index, text in enumerate(texts)]
    pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), path, row_group_size=ROWS)
    return path


@pytest.fixture
def noted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far it is stands in the note after every batch."""
    monkeypatch.setattr("train_jobs.data.token_streams._KEEP_S", 0.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainJobConfig:
    return tiny_job(corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet"))


@pytest.fixture(scope="module")
def whole(config: TrainJobConfig, tmp_path_factory: pytest.TempPathFactory) -> TokenStreams:
    directory = tmp_path_factory.mktemp("whole") / "data"
    assert prepare_tokens(config, directory)
    return TokenStreams(directory)


def cut_off_after(count: int, firsts: list[int]) -> Callable[..., Iterator[Encoded]]:
    """Encodes so many pieces; notes with which part it began."""

    def encode(parts: Sequence[CorpusPart], tokenizer: Any, first: int) -> Iterator[Encoded]:
        firsts.append(first)
        yield from itertools.islice(encode_here(parts, tokenizer, first), count)
        raise CutOffError

    return encode


@pytest.mark.parametrize("batch", [3, 256])
@pytest.mark.usefixtures("noted_at_once")
def test_work_that_is_cut_off_goes_on_with_the_part_where_it_was(
    batch: int, config: TrainJobConfig, whole: TokenStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH", batch)
    firsts: list[int] = []
    for _ in range(40):
        try:
            prepare_tokens(config, tmp_path / "data", encode=cut_off_after(4, firsts))
        except CutOffError:
            continue
    assert firsts == sorted(firsts)
    assert firsts[-1] == GROUPS
    assert len({*firsts}) > 3
    assert prepare_tokens(config, tmp_path / "data")
    assert_same(TokenStreams(tmp_path / "data"), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def half_done(config: TrainJobConfig, directory: Path) -> Path:
    """Work that was cut off after six parts, and noted."""
    with pytest.raises(CutOffError):
        prepare_tokens(config, directory, encode=cut_off_after(6, []))
    return directory / ".new"


def pieces(staged: Path, name: str) -> list[Path]:
    return sorted((staged / name).iterdir())


@pytest.mark.parametrize(
    "harm",
    [
        lambda staged: pieces(staged, "train")[0].write_bytes(b""),
        lambda staged: pieces(staged, "train")[1].unlink(),
        lambda staged: pieces(staged, "train")[-1].unlink(),
        lambda staged: shutil.rmtree(staged / "held_out_starts"),
        lambda staged: (staged / "so_far.json").write_text('{"origin": '),
        lambda staged: (staged / "so_far.json").unlink(),
        lambda staged: shutil.rmtree(staged),
        lambda staged: pieces(staged, "train")[-1].open("ab").write(b"half a token that nobody noted"),
        lambda staged: (staged / "train" / f"{10**6:015d}").write_bytes(b"a piece that nobody noted"),
        lambda staged: (staged.parent / "train.npy").write_bytes(b"half"),
    ],
)
@pytest.mark.usefixtures("noted_at_once")
def test_what_was_done_counts_only_where_all_of_it_is_there(
    harm: Callable[[Path], object],
    config: TrainJobConfig,
    whole: TokenStreams,
    tmp_path: Path,
) -> None:
    harm(half_done(config, tmp_path / "data"))
    assert prepare_tokens(config, tmp_path / "data")
    assert_same(TokenStreams(tmp_path / "data"), whole)


@pytest.mark.usefixtures("noted_at_once")
def test_what_was_done_of_other_documents_does_not_count(config: TrainJobConfig, tmp_path: Path) -> None:
    path = corpus(tmp_path / "corpus.parquet")
    mine = tiny_job(path)
    half_done(mine, tmp_path / "data")
    corpus(path, GROUPS + 1)
    firsts: list[int] = []
    with pytest.raises(CutOffError):
        prepare_tokens(mine, tmp_path / "data", encode=cut_off_after(1, firsts))
    half_done(mine, tmp_path / "data")
    other = mine.model_copy(update={"data": mine.data.model_copy(update={"held_out_every": 3})})
    with pytest.raises(CutOffError):
        prepare_tokens(other, tmp_path / "data", encode=cut_off_after(1, firsts))
    assert firsts == [0, 0]


@pytest.mark.parametrize(
    "where", ["tokens._check_sizes", "tokens.StreamWriter.seal", "token_streams._Stream.put_together"]
)
@pytest.mark.usefixtures("noted_at_once")
def test_a_kill_at_the_very_end_loses_nothing(
    where: str, config: TrainJobConfig, whole: TokenStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object) -> None:
        raise CutOffError

    with monkeypatch.context() as patched:
        patched.setattr(f"train_jobs.data.{where}", cut_off)
        with pytest.raises(CutOffError):
            prepare_tokens(config, tmp_path / "data")
    firsts: list[int] = []
    with suppress(CutOffError):  # where there was anything to look at
        prepare_tokens(config, tmp_path / "data", encode=cut_off_after(100, firsts))
    prepare_tokens(config, tmp_path / "data")
    assert firsts in ([], [GROUPS])
    assert_same(TokenStreams(tmp_path / "data"), whole)
    assert not (tmp_path / "data" / ".new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_what_is_mended_after_a_refusal_counts(
    config: TrainJobConfig, whole: TokenStreams, tmp_path: Path
) -> None:
    path = tmp_path / "chats.parquet"
    chat = [[{"role": "user", "content": "hello there"}]] * 90
    pq.write_table(pa.table({"text": chat}), path, row_group_size=9)
    shutil.copytree(whole.tokenizer_directory, tmp_path / "tokenizer")
    mine = tiny_job(path, data={"tokenizer": str(tmp_path / "tokenizer")})
    with pytest.raises(RequestError, match="no chat template"):
        prepare_tokens(mine, tmp_path / "data")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert prepare_tokens(mine, tmp_path / "data")


@pytest.mark.parametrize("other", [{"model": {"vocab_size": 280}}, {"data": {"tokenizer": "own"}}])
@pytest.mark.usefixtures("noted_at_once")
def test_what_was_done_with_another_tokenizer_does_not_count(
    other: dict[str, Any],
    config: TrainJobConfig,
    whole: TokenStreams,
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    shutil.copytree(whole.tokenizer_directory, own)
    source, firsts = Path(str(config.data.source)), list[int]()
    if "data" in other:
        mine = changed = tiny_job(source, data={"tokenizer": str(own)})
    else:
        mine, changed = config, tiny_job(source, **other)
    half_done(mine, tmp_path / "data")
    with (own / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(CutOffError):
        prepare_tokens(changed, tmp_path / "data", encode=cut_off_after(1, firsts))
    assert firsts == [0]


def seconds_a_part(seconds: float) -> Callable[[], float]:
    times = itertools.count(0.0, seconds)
    return lambda: next(times)


def write(
    config: TrainJobConfig, streams: TokenStreams, directory: Path, a_part_s: float, *, hand_over: bool
) -> list[str]:
    """Write the streams with a clock that shows so much more for every part; returns what was told."""
    said: list[str] = []
    tokenizer: Any = AutoTokenizer.from_pretrained(streams.tokenizer_directory)
    parts, clock = corpus_parts(config.data), seconds_a_part(a_part_s)
    writer = StreamWriter(Storage(directory), np.uint16, {})
    write_streams(
        config.data, parts, tokenizer, writer, encode_here, said.append, hand_over=hand_over, clock=clock
    )
    writer.keep()
    return said


def parts_in(directory: Path) -> int:
    """How many parts whoever goes on there finds."""
    return StreamWriter(Storage(directory), np.uint16, {}).parts


def test_what_takes_more_than_a_minute_is_handed_over_with_what_was_done(
    config: TrainJobConfig, whole: TokenStreams, tmp_path: Path
) -> None:
    with pytest.raises(LongWorkError, match="the rest takes about 2 min on one machine") as raised:
        write(config, whole, tmp_path, 10.0, hand_over=True)
    assert raised.value.rest_s == pytest.approx(10.0 * (GROUPS - 2))
    assert parts_in(tmp_path) == 2


@pytest.mark.parametrize(("a_part_s", "hand_over"), [(10.0, False), (5.0, True), (1.0, True)])
def test_what_takes_a_minute_at_most_or_has_its_helpers_is_done_where_it_is(
    a_part_s: float, hand_over: bool, config: TrainJobConfig, whole: TokenStreams, tmp_path: Path
) -> None:
    said = write(config, whole, tmp_path, a_part_s, hand_over=hand_over)
    assert parts_in(tmp_path) == GROUPS
    early = [each for each in said if each.endswith("left)")]
    assert len(early) == GROUPS - 2 - (4 if a_part_s == 1.0 else 0), "it takes a while to know how long"
    assert "tokens so far (17%, about " in said[1] or a_part_s == 1.0
    assert said[-1].endswith("tokens so far")


def test_a_corpus_of_one_part_is_nothing_to_share(tmp_path: Path, whole: TokenStreams) -> None:
    mine = tiny_job(corpus(tmp_path / "corpus.parquet", groups=1))
    write(mine, whole, tmp_path / "data", 1000.0, hand_over=True)
    assert parts_in(tmp_path / "data") == 1
