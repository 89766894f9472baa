"""How a program that runs on a host says its result, among what else is printed there."""

from __future__ import annotations

import json
from typing import Any

RESULT = "shoal-result "
"""Begins the line with it."""


def answer(document: Any) -> None:
    """Print the result."""
    print(RESULT + json.dumps(document), flush=True)
