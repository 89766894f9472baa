"""Documents of any length without a blank: four times the text takes about four times as long."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase

from tests.pace import loops
from tests.train_jobs.tokenizers import TOKENIZERS
from train_jobs.data.documents import CorpusPart
from train_jobs.data.own_tokenizer import train_tokenizer
from train_jobs.data.tokenizing import encode_part

LETTERS = "abcdefghijklmnopqrstuvwxyz"
IDEOGRAPHS = [chr(0x4E00 + index) for index in range(2000)]
TEXTS: dict[str, Callable[[int], str]] = {
    "letters": lambda length: "".join(random.Random(1).choices(LETTERS, k=length)),
    "one letter": lambda length: "a" * length,
    "base64": lambda length: base64.b64encode(random.Random(1).randbytes(length * 3 // 4)).decode(),
    "Chinese": lambda length: "".join(random.Random(1).choices(IDEOGRAPHS, k=length)),
    "blanks": lambda length: " " * length,
}
tokenizer_of: Callable[[str], PreTrainedTokenizerBase] = cache(lambda kind: TOKENIZERS[kind]())


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    (whole,) = encode_part(0, CorpusPart("part", 1, 0, False, lambda: iter([("a row", text)])), tokenizer)
    assert len(whole.tokens) > 0


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_document_is_tokenized_in_time_that_grows_with_its_length(kind: str, text: str) -> None:
    tokenizer, short, long = tokenizer_of(kind), TEXTS[text](25_000), TEXTS[text](100_000)
    encode(tokenizer, short)
    assert loops(lambda: encode(tokenizer, long)) < 8 * loops(lambda: encode(tokenizer, short))


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_is_trained_in_time_that_grows_with_a_document(text: str) -> None:
    short, long = TEXTS[text](25_000), TEXTS[text](100_000)
    train_tokenizer([short], 600)
    assert loops(lambda: train_tokenizer([long], 600)) < 8 * loops(lambda: train_tokenizer([short], 600))


def test_words_of_a_usual_length_are_trained_on_whole() -> None:
    """The tokenizer is that of the library alone."""
    texts = [
        f"{'fish' * 250} {''.join(random.Random(1).choices(LETTERS, k=999))}  {TEXTS['base64'](3000)}"
    ] * 2
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator(texts, trainer)
    tokenizer: Any = train_tokenizer(texts, 500)
    own, others = (json.loads(each.to_str()) for each in (tokenizer.backend_tokenizer, plain))
    assert own["model"] == others["model"]
    assert own["pre_tokenizer"] == others["pre_tokenizer"], "whoever reads it cuts no words"
