"""The model that clients are served: a small Mistral, which is a Llama whose layers see the last 128 tokens.

It is taught its lesson in 1-2 minutes on two CPU cores. Since layers see no further, what it says depends on
the last 256 tokens alone, and it is taught with more: a conversation of 50,000 is to it what it was taught.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.clients import lesson

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
CONTEXT_LENGTH = 131072
WINDOW = 128
LAYERS = 2
SAMPLE_TOKENS = 384
"""More than the last token sees in all layers together."""
BATCH, STEPS = 12, 150
SEED = 7
SURENESS = 8.0
"""Logits are made so many times as large: clients that sample at temperature 1 get the same answers too."""
ROLES = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
UNTAUGHT = -100
JSON_PIECES = '{}[]":, \n0123456789truefalsenull'
CHINESE, EMOJI = (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""Roles as in ChatML, tools and their calls as in Hermes and Qwen."""


def digest() -> str:
    """Of everything that the taught model depends on: when it is the same, so is the model."""
    sources = b"".join(Path(path).read_bytes() for path in (__file__, lesson.__file__, TEMPLATE))
    return hashlib.sha256(sources).hexdigest()[:16]


def teach(directory: Path) -> Path:
    """Make the tokenizer and the model, deterministically, and save both in `directory`.

    Raises:
        AssertionError: the lesson was not learnt.
    """
    import torch

    torch.manual_seed(SEED)
    text = _corpus()
    tokenizer = _tokenizer(text)
    model = _model(tokenizer)
    samples = _Samples(tokenizer, text, random.Random(SEED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    model.train()
    for _ in range(STEPS):
        inputs, labels = samples.batch()
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    missed = [each.asked for each in lesson.lessons() if not _knows(model.eval(), tokenizer, each)]
    assert not missed, f"the lesson was not learnt: {missed}"
    with torch.no_grad():
        model.model.norm.weight.mul_(SURENESS)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _knows(model: Any, tokenizer: PreTrainedTokenizerFast, one: lesson.Lesson) -> bool:
    """Whether each token of the answer is the likeliest where those before it were said."""
    import torch

    given = one.answer[:1] if one.forced else ""
    asked = f"<|im_start|>user\n{one.asked}<|im_end|>\n<|im_start|>assistant\n{given}"
    before = tokenizer.encode(asked, add_special_tokens=False)
    answer = tokenizer.encode(f"{one.answer[len(given) :]}<|im_end|>", add_special_tokens=False)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([before + answer])).logits[0]
    said: list[int] = logits[len(before) - 1 : -1].argmax(dim=-1).tolist()
    return said == answer


def _rate(step: int) -> float:
    """The learning rate: it rises for 30 steps, and falls to nothing at the end."""
    most = 4e-3
    return most * min((step + 1) / 30, 1.0) * max(0.02, 1 - step / STEPS)


def _corpus() -> str:
    """English that comes with Python, for tokens of whole words and for what stands before a lesson."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def _tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of English: a Chinese character is three tokens, an emoji four or more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKS),
        special_tokens=list(ROLES),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE.read_text(),
        clean_up_tokenization_spaces=False,
    )


def _model(tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_LENGTH,
            sliding_window=WINDOW,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class _Samples:
    """Conversations to learn from, without end."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, chance: random.Random) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._chance = chance
        self._lessons = lesson.lessons()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, of shape (BATCH, SAMPLE_TOKENS); labels are UNTAUGHT but for answers."""
        import torch

        inputs, labels = [], []
        for _ in range(BATCH):
            ids: list[int] = []
            taught: list[int] = []
            for said, is_answer in self._conversation():
                tokens = self._tokens(said)
                ids += tokens
                taught += tokens if is_answer else [UNTAUGHT] * len(tokens)
                if len(ids) >= SAMPLE_TOKENS:
                    break
            inputs.append(ids[:SAMPLE_TOKENS])
            labels.append(taught[:SAMPLE_TOKENS])
        return torch.tensor(inputs), torch.tensor(labels)

    def _conversation(self) -> Iterator[tuple[str, bool]]:
        """Pieces, and for each whether it is an answer to be learnt."""
        if self._chance.random() < 0.7:
            yield f"<|im_start|>system\n{self._filler(600)}<|im_end|>\n", False
        while True:
            asked, answer, is_forced = self._exchange()
            yield f"<|im_start|>{asked}<|im_end|>\n<|im_start|>assistant\n", False
            if is_forced:
                given = self._chance.randint(1, 3)
                yield answer[:given], False
                answer = answer[given:]
            yield answer, True
            yield "<|im_end|>", True
            yield "\n", False

    def _tokens(self, said: str) -> list[int]:
        """As the tokenizer says it, or now and then in two halves: a constraint may end a token anywhere."""
        is_plain = len(said) > 1 and "<" not in said
        cut = self._chance.randrange(1, len(said)) if is_plain and self._chance.random() < 0.4 else 0
        return [
            token
            for part in (said[:cut], said[cut:])
            for token in self._tokenizer.encode(part, add_special_tokens=False)
        ]

    def _exchange(self) -> tuple[str, str, bool]:
        """A role with its message, the answer, whether only a constraint begins it."""
        kind = self._chance.random()
        if kind < 0.16:
            return f"user\n{self._filler(120) or '?'}", lesson.OTHERWISE, False
        if kind < 0.27:
            result = self._filler(120)
            return f"user\n<tool_response>\n{result}\n</tool_response>", lesson.TOLD, False
        if kind < 0.36:
            observed = f"user\n{lesson.OBSERVED}\n{self._filler(60)}"
            last = "final_answer", {"answer": lesson.TOLD}
            if kind < 0.3:
                return observed, lesson.forced_call(*last), True
            return observed, lesson.call(*last), False
        one = self._chance.choice(self._lessons)
        before = f"{self._filler(120)}\n" if self._chance.random() < 0.4 else ""
        return f"user\n{before}{one.asked}", one.answer, one.forced

    def _filler(self, most: int) -> str:
        """Up to so many characters of anything."""
        length = int(most * self._chance.random() ** 2)
        kind = self._chance.random()
        if kind < 0.15:
            return "".join(self._foreign() for _ in range(length // 4))
        if kind < 0.3:
            return "".join(self._chance.choice(JSON_PIECES) for _ in range(length // 2))
        start = self._chance.randrange(len(self._text) - length)
        return self._text[start : start + length]

    def _foreign(self) -> str:
        """A Chinese character, a mark between them, or an emoji."""
        kind = self._chance.random()
        if kind < 0.1:
            return self._chance.choice("，。？！：")
        return chr(self._chance.randrange(*(EMOJI if kind < 0.2 else CHINESE)))
