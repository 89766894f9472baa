"""From documents to tokens: the tokenizer, and the two token streams of a job on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.wording import counted
from train_jobs.data.documents import Document, read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
FACTS = "streams.json"
TOKENIZER = "tokenizer"
"""Names in the directory of the prepared data."""
_BATCH = 256  # documents tokenized at once: bounds the memory, keeps the tokenizer's threads busy


Tell = Callable[[str], None]
"""Takes a sentence about how far something is."""


def _nobody(_: str) -> None: ...


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of at most `vocab_size` tokens, in transformers' own class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(directory: str, key: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory; `key` names the config key for the error message."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{key} {directory!r} holds no tokenizer that transformers can load: {error}"
        ) from error


def tokenizer_for(config: TrainJobConfig, own: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer that the config names, or one trained on the documents that are not held out.

    Args:
        own: where the one lies that the job has trained before: its model knows no other.
    """
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer, "data.tokenizer")
    if config.model.directory is not None:
        return load_tokenizer(config.model.directory, "model.directory")
    if own is not None:
        return load_tokenizer(str(own), "the job's own tokenizer")
    return train_tokenizer(
        (document.text for document in read_documents(config.data) if not document.held_out),
        config.model.vocab_size,
    )


class TokenStream(NamedTuple):
    """One part of a corpus: all its tokens, and where each document begins (both of one dimension)."""

    tokens: np.ndarray
    starts: np.ndarray


class TokenStreams:
    """A job's corpus as two token streams (training, held out) in one directory, memory-mapped.

    Files: `train.npy`, `held_out.npy` (tokens), `train_starts.npy`, `held_out_starts.npy` (documents),
    `tokenizer/` (Hugging Face format) and `streams.json`, written last: with what they were made of.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        facts: dict[str, Any] = json.loads((directory / FACTS).read_text())
        self.vocab_size: int = facts["vocab_size"]
        self.content: str = facts.get("content", "")
        """A digest of the training tokens."""
        self.train = self._open("train")
        self.held_out = self._open("held_out")

    def _open(self, part: str) -> TokenStream:
        return TokenStream(
            np.load(self.directory / f"{part}.npy", mmap_mode="r"),
            np.load(self.directory / f"{part}_starts.npy", mmap_mode="r"),
        )

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / TOKENIZER


def prepare_tokens(config: TrainJobConfig, directory: Path, tell: Tell = _nobody) -> bool:
    """Tokenize a job's corpus into `directory`; what was made of the same is not made again.

    Args:
        tell: told again and again how far that is.

    Returns:
        whether it was made, or made anew: the config names another source, or another way to read it.

    Raises:
        RequestError: the corpus cannot be read, is too small for one global batch, or holds nothing to
            evaluate on; what was there stays.
    """
    staged = directory.with_name(f".{directory.name}.new")
    if not directory.exists() and (staged / FACTS).exists():
        staged.rename(directory)  # whoever made it ended before the last word
    if tokens_are_there(config, directory):
        _check_sizes(config, TokenStreams(directory))
        return False
    made_of, known = _made_of(config), _facts(directory)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    trained = known is not None and known.get("made_of", {}).get("tokenizer") is None
    tell("reading the documents, and the tokenizer")
    tokenizer = tokenizer_for(config, directory / TOKENIZER if trained else None)
    content = _write_streams(tokenizer, read_documents(config.data), staged, tell)
    tokenizer.save_pretrained(staged / TOKENIZER)
    facts = {"vocab_size": len(tokenizer), "made_of": made_of, "content": content}
    (staged / FACTS).write_text(json.dumps(facts))
    _check_sizes(config, TokenStreams(staged))
    # At no moment is neither of the two whole: a tokenizer that the job has trained must not be lost.
    before = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(before, ignore_errors=True)
    if directory.exists():
        directory.rename(before)
    staged.rename(directory)
    shutil.rmtree(before, ignore_errors=True)
    return True


def tokens_are_there(config: TrainJobConfig, directory: Path) -> bool:
    """Whether a directory holds the streams of this config."""
    made_of, known = _made_of(config), _facts(directory)
    return known is not None and known.get("made_of", made_of) == made_of


def _made_of(config: TrainJobConfig) -> dict[str, Any]:
    """All that the streams follow from, as the config has it."""
    data = config.data
    return {
        "source": config.source,
        "held_out_source": data.held_out_source,
        "text_column": data.text_column,
        "held_out_every": data.held_out_every if data.held_out_source is None else None,
        "tokenizer": data.tokenizer or config.model.directory,
    }


def _facts(directory: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads((directory / FACTS).read_text())
    except FileNotFoundError:
        return None
    return facts


def _write_streams(
    tokenizer: PreTrainedTokenizerBase, documents: Iterator[Document], directory: Path, tell: Tell
) -> str:
    """Both streams: every document's tokens, each followed by the end-of-text token.

    Returns:
        a digest of the training tokens.
    """
    kind = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    end = tokenizer.eos_token_id
    with ExitStack() as stack:
        writers = {
            held_out: stack.enter_context(_StreamWriter(directory, name, kind))
            for held_out, name in ((False, "train"), (True, "held_out"))
        }
        while batch := list(islice(documents, _BATCH)):
            for document, tokens in zip(batch, _encoded(tokenizer, batch), strict=True):
                ends = end is None or (document.chat is not None and tokens[-1:] == [end])
                writers[document.held_out].add(tokens if ends else [*tokens, end])
            count = sum(len(writer.starts) for writer in writers.values())
            size = sum(writer.length for writer in writers.values())
            tell(f"tokenized {counted(count, 'document')}, {size:,} tokens so far")
    return writers[False].digest.hexdigest()


def _encoded(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[list[int]]:
    """The tokens of each document.

    Raises:
        RequestError: a conversation cannot be put into the words of the tokenizer's template.
    """
    # What looks like a special token in a text is text: a page about `<|endoftext|>` does not end there.
    plain = [document.text for document in documents if document.chat is None]
    as_text = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    encoded = tokenizer(plain, **as_text) if plain else {}
    tokens = iter(encoded.get("input_ids", ()))
    return [
        next(tokens) if document.chat is None else _of_chat(tokenizer, document) for document in documents
    ]


def _of_chat(tokenizer: PreTrainedTokenizerBase, document: Document) -> list[int]:
    assert document.chat is not None, "it is a conversation"
    if tokenizer.chat_template is None:
        raise RequestError(
            f"{document.name} holds a conversation, and the tokenizer has no chat template;"
            " data.tokenizer, or model.directory, should name one that has"
        )
    chat: list[dict[str, Any]] = [dict(said) for said in document.chat]
    try:
        tokens: Any = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    except Exception as error:  # a template raises what it likes
        raise RequestError(f"{document.name}: the tokenizer's chat template refuses it: {error}") from error
    return list(tokens)


class _StreamWriter:
    """Writes one stream as it comes: a corpus need not fit into memory, only the places of its documents."""

    def __init__(self, directory: Path, part: str, kind: type[np.generic]) -> None:
        self.directory = directory
        self.part = part
        self.kind = kind
        self.raw = directory / f"{part}.raw"
        self.starts: list[int] = []
        self.length = 0
        self.digest = hashlib.blake2b(digest_size=16)

    def __enter__(self) -> _StreamWriter:
        self.file = self.raw.open("wb")
        return self

    def add(self, tokens: Sequence[int]) -> None:
        self.starts.append(self.length)
        self.length += len(tokens)
        written = np.asarray(tokens, dtype=self.kind).tobytes()
        self.digest.update(written)
        self.file.write(written)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.file.close()
        if kind is None:
            target = np.lib.format.open_memmap(
                self.directory / f"{self.part}.npy", mode="w+", dtype=self.kind, shape=(self.length,)
            )
            if self.length:
                target[:] = np.memmap(self.raw, dtype=self.kind, mode="r")
            target.flush()
            np.save(self.directory / f"{self.part}_starts.npy", np.asarray(self.starts, dtype=np.int64))
        self.raw.unlink()


def _check_sizes(config: TrainJobConfig, streams: TokenStreams) -> None:
    train, held_out = len(streams.train.tokens), len(streams.held_out.tokens)
    needed = config.batch.global_size * config.data.sequence_length + 1
    if train < needed:
        raise RequestError(
            f"data.source {config.source!r} gives {train} training tokens; one step takes {needed} "
            f"(batch.global {config.batch.global_size} × data.sequence_length "
            f"{config.data.sequence_length} + 1)"
        )
    if held_out < 2 and config.evaluate.every_steps is not None:
        raise RequestError(
            f"data.source {config.source!r} has no document to evaluate on: data.held_out_every is "
            f"{config.data.held_out_every} and there are fewer documents than that; evaluate.every_steps: "
            "null evaluates nothing"
        )
