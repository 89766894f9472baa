"""What the gateway's process logs, as lines of JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from serve_apps.http.request_record import current_id, shown

requests_logger = logging.getLogger("shoal.gateway")
"""One JSON line for each request that has ended."""

_LEVELS = {"shoal": logging.INFO, "serve_apps": logging.INFO, "uvicorn": logging.WARNING}
"""Loggers of the gateway's process whose lines are JSON."""


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON, with the id of the request that was answered.

    Args:
        facts: what every line says besides.
    """

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        if record.name == requests_logger.name:
            return record.getMessage()  # is JSON
        document: dict[str, Any] = {
            "time": shown(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": current_id(),
            **self._facts,
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class _JsonHandler(logging.StreamHandler[Any]):
    """Writes to the process's own standard error.

    Serve puts a logger in its place that looks through the stack for each line, and writes no plain JSON.
    """

    def __init__(self, **facts: Any) -> None:
        super().__init__(sys.__stderr__)
        self.setFormatter(JsonFormatter(**facts))


def log_as_json(levels: Mapping[str, int] = _LEVELS, **facts: Any) -> None:
    """Write what a process logs to standard error as lines of JSON, whoever else has set up logging.

    Args:
        facts: what every line says besides.
    """
    for name, level in levels.items():
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _JsonHandler) for handler in logger.handlers):
            logger.addHandler(_JsonHandler(**facts))
            logger.setLevel(level)
            logger.propagate = False
