"""From documents to tokens: the tokenizer, and the two token streams of a job on disk."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.local_copy import files_here
from cluster.files.storage import Storage, as_storage
from cluster.models.directory_here import directory_here
from train_jobs.data.documents import corpus_parts
from train_jobs.data.identity import tokenizer_identity
from train_jobs.data.made_before import copy_made_before, key_of, note_made
from train_jobs.data.own_tokenizer import texts_to_train_on, train_tokenizer
from train_jobs.data.token_streams import (
    STAGED,
    TOKENIZER,
    StreamWriter,
    has_begun,
    put_together,
    read_facts,
    sizes_of,
    token_type,
)
from train_jobs.data.tokenizing import (
    Encode,
    Tell,
    digest_of_parts,
    encode_here,
    write_streams,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OF_TOKENIZERS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""How the files end that a tokenizer is read from."""


def _nobody(_: str) -> None: ...


def load_tokenizer(directory: str, key: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory (a path or a URI).

    Args:
        key: of the config, for the error message.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory_here(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{key} {directory!r} holds no tokenizer that transformers can load: {error}"
        ) from error


def tokenizer_for(
    config: TrainJobConfig, own: Path | None = None, tell: Tell = _nobody
) -> PreTrainedTokenizerBase:
    """The tokenizer that the config names, or one trained on the documents that are not held out.

    Args:
        own: where the one lies that the job has trained before: its model knows no other.
        tell: told again and again how far the training is.
    """
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer, "data.tokenizer")
    if config.model.directory is not None:
        return load_tokenizer(config.model.directory, "model.directory")
    if own is not None:
        return load_tokenizer(str(own), "the job's own tokenizer")
    return train_tokenizer(texts_to_train_on(config.data, tell), config.model.vocab_size)


def prepare_tokens(
    config: TrainJobConfig,
    directory: Storage | Path,
    tell: Tell = _nobody,
    encode: Encode = encode_here,
    hand_over: bool = False,
    notes: Storage | None = None,
) -> bool:
    """Tokenize a job's corpus into `directory`; what was made of the same is not made again.

    Nothing of the corpus or of its tokens is written to a disk of this machine, but to a directory that is
    here.

    Args:
        tell: told again and again how far that is.
        encode: encodes the corpus' parts.
        hand_over: it ends where it takes long and others could help.
        notes: where jobs note what they have made: what another one has made of the same is copied.

    Returns:
        whether it was made, or made anew: the config names another source, or another way to read it.

    Raises:
        LongWorkError: it is handed over.
        RequestError: the corpus cannot be read, is too small for one global batch, or holds nothing to
            evaluate on; what was there stays.
        StorageError: the directory cannot be read or written.
    """
    place = as_storage(directory)
    was_sealed = put_together(place, tell)  # whoever made it ended before the last word
    if tokens_are_there(config, place):
        _check_sizes(config, *sizes_of(place))
        return was_sealed
    made_of, staged = _made_of(config), place.child(STAGED)
    tell("reading the documents, and the tokenizer")
    parts = corpus_parts(config.data)
    origin = {"made_of": made_of, "tokenizer": _origin(config), "parts": digest_of_parts(parts)}
    key = None if notes is None else key_of(config, origin)
    begun = has_begun(place, origin)
    fresh = not begun and read_facts(place) is None

    def copied(key: str | None) -> bool:
        if notes is None or key is None or not fresh or not copy_made_before(notes, key, place, made_of):
            return False
        tell("another job has made the same tokens: they are copied")
        place.delete_dir(STAGED)
        _check_sizes(config, *sizes_of(place))
        return True

    if copied(key):
        return True
    if not begun:
        place.delete_dir(STAGED)
        _stage_tokenizer(config, place, tell)
    with files_here(staged.child(TOKENIZER)) as here:
        tokenizer = load_tokenizer(str(here), "the job's own tokenizer")
    same = None if key is None else _key_wherever(config, origin, tokenizer)
    if copied(same):
        return True
    writer = StreamWriter(place, token_type(len(tokenizer)), origin)
    try:
        write_streams(config.data, parts, tokenizer, writer, encode, tell, hand_over=hand_over)
    except RequestError:
        writer.forget()  # whatever is mended now, the tokenizer's files too, counts the next time
        raise
    # Before they count as made: what is too small now may have grown by the next time.
    _check_sizes(config, *writer.sizes)
    writer.seal({"vocab_size": len(tokenizer), "made_of": made_of})
    made = put_together(place, tell)
    for each in (key, same):
        if notes is not None and each is not None:
            note_made(notes, each, place)
    return made


def _key_wherever(
    config: TrainJobConfig, origin: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """What streams are known by wherever their tokenizer lies, and whoever has trained it."""
    identity = tokenizer_identity(tokenizer)
    if identity is None:
        return None
    made_of = {**origin["made_of"], "tokenizer": None}
    return key_of(config, {**origin, "made_of": made_of, "tokenizer": identity})


def _stage_tokenizer(config: TrainJobConfig, place: Storage, tell: Tell) -> None:
    """Put the tokenizer beside the streams that are made with it."""
    known = read_facts(place)
    trained = known is not None and known.get("made_of", {}).get("tokenizer") is None
    with files_here(place.child(TOKENIZER)) as own, tempfile.TemporaryDirectory() as saved:
        tokenizer_for(config, own if trained else None, tell).save_pretrained(saved)
        place.child(STAGED).upload_dir(saved, TOKENIZER)


def _origin(config: TrainJobConfig) -> str | int:
    """What the tokenizer is: the size of one to be trained, or a digest of the files of one that is there."""
    directory = config.data.tokenizer or config.model.directory
    if directory is None:
        return config.model.vocab_size
    files = sorted(
        path for path in Path(directory_here(directory)).glob("*.*") if path.suffix in _OF_TOKENIZERS
    )
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def tokens_are_there(config: TrainJobConfig, directory: Storage | Path) -> bool:
    """Whether a directory holds the streams of this config."""
    made_of, known = _made_of(config), read_facts(as_storage(directory))
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


def _check_sizes(config: TrainJobConfig, train: int, held_out: int) -> None:
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
