"""What vLLM's processes say went wrong: the root cause, which its exceptions here only refer to."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
"""Where vLLM, and each of its processes, takes the configuration of its logging from."""

_BEGINS = "\x1e"
_TRACEBACK = "Traceback (most recent call last):\n"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: |$)", re.MULTILINE)
_MOST = 1000


@contextmanager
def errors_kept(directory: Path) -> Iterator[None]:
    """The errors of a vLLM that is started in this context go to a file in the directory too.

    Whoever has a configuration of vLLM's logging keeps that.
    """
    if _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = str(_write_config(directory))
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def root_cause(directory: Path) -> str | None:
    """The message of the first exception that vLLM's processes wrote down; None where there is none."""
    try:
        records = _errors(directory).read_text(errors="replace").split(_BEGINS)
    except OSError:
        return None
    for record in records:
        *_, raised = record.rpartition(_TRACEBACK)
        if _TRACEBACK in record and (found := _RAISED.search(raised)) is not None:
            message = raised[found.end() :].strip() or raised[found.start() : found.end()].strip()
            return message if len(message) <= _MOST else f"{message[:_MOST]} …"
    return None


def _write_config(directory: Path) -> Path:
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    config = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    config["formatters"]["errors"] = {"class": "logging.Formatter", "format": f"{_BEGINS}%(message)s"}
    config["handlers"]["errors"] = {
        "class": "logging.FileHandler",
        "filename": str(_errors(directory)),
        "formatter": "errors",
        "level": "ERROR",
    }
    config["loggers"]["vllm"]["handlers"] = [*config["loggers"]["vllm"]["handlers"], "errors"]
    path = directory / "logging.json"
    path.write_text(json.dumps(config))
    return path


def _errors(directory: Path) -> Path:
    return directory / "errors.log"
