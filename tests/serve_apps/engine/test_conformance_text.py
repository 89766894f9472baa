"""Where an answer's text begins and ends, held by each engine that is installed: characters that stand at
its edges whole, half, or as the replacement character; and both of the model's ends of sequence."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from serve_apps.engine.detokenize import REPLACEMENT
from serve_apps.engine.protocol import SamplingParams
from serve_apps.engine.token_pieces import TokenPieces
from tests.serve_apps.engine.conftest import Asker, Reference
from tests.serve_apps.engine.test_conformance import ENGINES, greedy, start

OTHER_END = 40
"""An end of sequence of the generation config; the tokenizer's own is another."""


class Bytes:
    """A tokenizer that knows each byte."""

    def __init__(self, tokenizer: Any) -> None:
        self.piece = lambda token: TokenPieces(tokenizer).of(token)[1]
        self._ids = {piece: token for token in range(len(tokenizer)) if len(piece := self.piece(token)) == 1}

    def ids(self, data: bytes) -> list[int]:
        return [self._ids[bytes([byte])] for byte in data]


@pytest.fixture(scope="module")
def as_bytes(wide: Path) -> Bytes:
    return Bytes(Reference(wide).tokenizer)


@pytest.fixture(scope="module")
def with_two_ends(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two-ends")
    for file in wide.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        said = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**said, "eos_token_id": OTHER_END}))
    return path


@pytest.fixture(scope="module", params=ENGINES)
def asker(request: pytest.FixtureRequest, with_two_ends: Path) -> Iterator[Asker]:
    name, options = request.param
    asker = start(name, with_two_ends, **options)
    yield asker
    asker.close()


WHOLE = ["ab", "ab\ufffd", "\ufffd\ufffd", "é", "\ufffdé"]


@pytest.mark.parametrize("prompt", WHOLE)
@pytest.mark.parametrize("text", ["\ufffd", "x\ufffd", "\ufffdé", "é\ufffd\ufffd", "x"])
def test_a_replacement_character_is_one_as_any_other(
    prompt: str, text: str, asker: Asker, as_bytes: Bytes
) -> None:
    answer = asker.run(asker.answer(as_bytes.ids(prompt.encode()), greedy(40, choice=(text,))))
    assert (answer.text, answer.finish_reason) == (text, "stop")


@pytest.mark.parametrize("before", ["", "ab", "a\ufffd"])
@pytest.mark.parametrize("character", ["é", "你", "😀", "\ufffd"])
def test_what_a_prompt_breaks_off_in_the_middle_of_is_whole_in_the_answer(
    before: str, character: str, asker: Asker, as_bytes: Bytes
) -> None:
    *prompt, last = as_bytes.ids((before + character).encode())
    answer = asker.run(asker.answer(prompt, greedy(1, allowed_token_ids=(last,))))
    assert answer.text == character


def expected(prompt: bytes, answer: bytes) -> str:
    """The whole characters of an answer, with one that the prompt has begun."""
    begun = codecs.getincrementaldecoder("utf-8")("replace").decode(prompt)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(prompt + answer)[len(begun) :]


@pytest.mark.parametrize(
    "prompt", [*(text.encode() for text in WHOLE), "é".encode()[:1], "a😀".encode()[:-2], b"a\x80"], ids=repr
)
def test_nothing_of_a_prompt_is_in_the_answer(prompt: bytes, asker: Asker, as_bytes: Bytes) -> None:
    asked = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(6)]

    async def ask() -> Sequence[Any]:
        return await asyncio.gather(*(asker.answer(as_bytes.ids(prompt), one) for one in asked))

    for answer in asker.run(ask()):
        gained = b"".join(as_bytes.piece(token) for token in answer.token_ids)
        # Rubbish is told in other numbers of replacement characters by other decoders.
        assert answer.text.replace(REPLACEMENT, "") == expected(prompt, gained).replace(REPLACEMENT, "")


@pytest.mark.parametrize("end", [0, OTHER_END])
def test_an_answer_ends_at_the_tokenizers_own_end_and_at_the_generation_configs(
    end: int, asker: Asker
) -> None:
    forced = {"logit_bias": ((end, 100.0),)}
    answer = asker.run(asker.answer([5, 6, 7], greedy(4, **forced)))
    assert (answer.token_ids, answer.text, answer.finish_reason) == ((end,), "", "stop")
    answer = asker.run(asker.answer([5, 6, 7], greedy(4, ignore_eos=True, **forced)))
    assert (answer.token_ids, answer.finish_reason) == ((end,) * 4, "length")
