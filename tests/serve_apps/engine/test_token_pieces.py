"""Tokens in bytes, for the tokenizers that people's models have; joined, those of a text are the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.engine.token_pieces import TokenPieces
from tests.serve_apps.tiny_model import make_tokenizer


def byte_level(directory: Path) -> Any:
    """As GPT-2, Llama 3 and Qwen have it: every byte has a printable character of its own."""
    from transformers import AutoTokenizer

    make_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def sentencepiece(directory: Path) -> Any:
    """As Llama 2, Mistral and Gemma have it: ▁ for a blank, and bytes for what has no token."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁▁", "a", "b", "c", "ab", "▁ab", "▁c"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [("▁", "▁"), ("a", "b"), ("▁", "ab"), ("▁", "c")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param(tmp_path_factory.mktemp("tokenizer"))


@given(text=st.text(st.sampled_from("abc é你😀\ufffd\n"), min_size=1))
def test_joined_they_are_the_text(tokenizer: Any, text: str) -> None:
    of = TokenPieces(tokenizer).of
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    joined = b"".join(of(token)[1] for token in ids).decode()
    assert joined in (text, f" {text}"), "SentencePiece adds a blank before the first word"


def test_a_blank_is_kept_and_a_part_of_a_character_is_its_bytes(tmp_path: Path) -> None:
    of, vocabulary = TokenPieces(found := sentencepiece(tmp_path)).of, sentencepiece(tmp_path).get_vocab()
    assert found.decode([vocabulary["▁ab"]]) == "ab"
    assert of(vocabulary["▁ab"]) == (" ab", b" ab")
    assert of(vocabulary["<0xF0>"]) == ("\ufffd", b"\xf0")


def test_what_is_no_text_has_a_name_and_no_bytes(tokenizer: Any) -> None:
    of = TokenPieces(tokenizer).of
    assert of(tokenizer.eos_token_id) == (tokenizer.eos_token, b"")


def test_a_model_may_have_more_tokens_than_its_tokenizer(tokenizer: Any) -> None:
    assert TokenPieces(tokenizer).of(len(tokenizer) + 10)[1] == b""
