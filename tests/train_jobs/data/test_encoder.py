"""What documents say stays text; what a chat template writes are special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from tests.train_jobs.tokenizers import TEXTS, TOKENIZERS
from train_jobs.data import encoder
from train_jobs.data.documents import CorpusPart
from train_jobs.data.encoder import DocumentEncoder
from train_jobs.data.own_tokenizer import train_tokenizer
from train_jobs.data.tokenizing import encode_part

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% if not loop.last %}\n{% endif %}{% endfor %}{{ eos_token }}"
)
EVERYTHING = (
    "{{ messages | tojson }} {{ messages[0].content }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n"
    "{% if m.reasoning %}({{ m.reasoning | trim }}){% endif %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)
TURNS = ("<|im_start|>", "<|im_end|>")
EXACT = [kind for kind in TOKENIZERS if kind != "word pieces"]
"""Those that give a text back as it was."""


@cache
def tokenizer_of(kind: str, template: str = CHATML, *, strips: bool = False) -> PreTrainedTokenizerBase:
    tokenizer = TOKENIZERS[kind]()
    turns = [AddedToken(text, special=True, normalized=False, rstrip=strips, lstrip=strips) for text in TURNS]
    tokenizer.add_tokens(turns, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer: PreTrainedTokenizerBase, *values: Any) -> list[list[int]]:
    """The tokens of each document, as they come to a stream."""
    part = CorpusPart(
        "part", len(values), 0, False, lambda: ((f"row {row}", v) for row, v in enumerate(values))
    )
    (whole,) = encode_part(0, part, tokenizer)
    ends = whole.lengths.cumsum()
    return [
        whole.tokens[end - length : end].tolist() for end, length in zip(ends, whole.lengths, strict=True)
    ]


def chat_of(*contents: Any) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]


def special_in(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The special tokens among others, in their order."""
    special = set(tokenizer.convert_tokens_to_ids([*TURNS, str(tokenizer.eos_token)]))
    return tokenizer.convert_ids_to_tokens([token for token in tokens if token in special])


@pytest.mark.parametrize("kind", EXACT)
def test_special_tokens_of_a_conversation_are_those_that_the_template_writes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    end = str(tokenizer.eos_token)
    chat = chat_of(
        "who ends with <|im_end|>?",
        f"<|im_end|>\n<|im_start|>system\nhello{end}",
        f"{end}{end}<|im_start|>",
        f"hello {TURNS[0]}{TURNS[1]} fish",
    )
    (tokens,) = encoded(tokenizer, chat)
    assert special_in(tokenizer, tokens) == [*TURNS * 4, end]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    decoded = tokenizer.decode(tokens)
    if kind in ("always", "prepended"):  # a blank comes before all that follows a special token
        text, decoded = text.replace(" ", ""), decoded.replace(" ", "")
    assert decoded.removeprefix(" ") == text


def test_words_in_a_conversation_are_the_tokens_that_they_are_in_a_text() -> None:
    tokenizer = tokenizer_of("byte level")
    (tokens,) = encoded(tokenizer, chat_of("it ends with <|im_end|> and goes on"))
    begins, ends = tokenizer.convert_tokens_to_ids(list(TURNS))
    (said,) = encoded(tokenizer, "user\nit ends with <|im_end|> and goes on")
    assert tokens == [begins, *said[:-1], ends, said[-1]]


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(contents=st.lists(st.text("ab <|>\n▁é魚𪛖𪛕", max_size=12), min_size=1, max_size=4))
def test_other_conversations_are_the_same_tokens_in_both_ways(
    kind: str, strips: bool, contents: list[str]
) -> None:
    tokenizer = tokenizer_of(kind, strips=strips)
    chat = chat_of(*contents)
    usual = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert DocumentEncoder(tokenizer).of_hidden(chat) == usual


def test_a_conversation_without_such_text_goes_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(encoder, "RenamedTokens")
    tokenizer, chat = tokenizer_of("byte level"), chat_of("hello <|im_", "end|> fish")
    usual = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert encoded(tokenizer, chat) == [usual]


def test_every_string_of_a_message_is_text() -> None:
    tokenizer = tokenizer_of("byte level", EVERYTHING)
    both = "<|im_end|> <|endoftext|>"
    call = {"name": both, "arguments": {both: [both], "line": "a\n<|im_start|>"}}
    chat = [
        {"role": "user", "name": both, "content": [{"type": "text", "text": f" {both}\n"}]},
        {
            "role": "assistant",
            "reasoning": f"\n{both} ",
            "content": [],
            "tool_calls": [{"type": "function", "function": call}],
        },
    ]
    (tokens,) = encoded(tokenizer, chat)
    assert special_in(tokenizer, tokens) == [*TURNS * 2, "<|endoftext|>"], "the last is no part of it"
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert f"({both})" in text
    assert tokenizer.decode(tokens) == f"{text}<|endoftext|>"


def test_a_template_trims_what_looks_like_a_special_token_as_it_trims_any_text() -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_tokens([AddedToken("\n<sep>", special=True, normalized=False)], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}\n<sep>{% endfor %}"
    (tokens,) = encoded(tokenizer, chat_of("\n<sep>hello", " fish\n<sep> "))
    assert tokenizer.decode(tokens) == "<sep>hello\n<sep>fish\n<sep>\n<sep><|endoftext|>"
    assert tokens.count(tokenizer.convert_tokens_to_ids("\n<sep>")) == 2


def test_text_that_has_the_names_of_tokens_stays_as_it_is() -> None:
    tokenizer = tokenizer_of("byte level")
    rare = "".join(map(chr, range(0x2A600, 0x2A6D7)))
    chats = [chat_of("<|im_end|>"), chat_of(f"<|im_end|>{rare}", rare)]
    for chat, tokens in zip(chats, encoded(tokenizer, *chats), strict=True):
        assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(chat, tokenize=False)
        assert special_in(tokenizer, tokens) == [*TURNS * len(chat), "<|endoftext|>"]


@pytest.mark.parametrize("kind", EXACT)
def test_text_of_every_tokenizer_that_looks_like_a_special_token_stays_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    end = str(tokenizer.eos_token)
    texts = [f"how {end} ends", "hello fish", f"{end}<|im_start|>"]
    for text, tokens in zip(texts, encoded(tokenizer, *texts), strict=True):
        assert special_in(tokenizer, tokens) == [end]
        assert tokenizer.decode(tokens).removeprefix(" ") == f"{text}{end}"
