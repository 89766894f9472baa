"""Whether a directory holds the files of a Hugging Face model, as far as their names and config.json tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")


def directory_lacks(directory: Path, tokenizer: bool) -> str | None:
    """What a directory lacks to be trained on, beside the config.json; the end of "`PATH` …".

    Args:
        tokenizer: it has to hold one.
    """
    try:
        content: Any = json.loads((directory / "config.json").read_bytes())
        if not isinstance(content.get("model_type"), str):
            return "holds a config.json without model_type, which transformers goes by"
        if not any(any(directory.glob(pattern)) for pattern in _WEIGHTS):
            return f"holds no weights ({', '.join(_WEIGHTS)})"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return tokenizer_problem(directory) if tokenizer else None


def tokenizer_problem(directory: Path) -> str | None:
    """Why a directory is no tokenizer's, as far as its files' names tell; the end of "`PATH` …"."""
    try:
        if not directory.exists():
            return "does not exist"
        found = any(any(directory.glob(pattern)) for pattern in _TOKENIZERS)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if found else f"holds no tokenizer ({', '.join(_TOKENIZERS)})"
