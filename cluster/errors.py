"""The errors that users can cause; each message is a sentence for the person who can mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


class ShoalError(Exception):
    """Something failed for a reason the user can act on; the command exits with `exit_code`."""

    exit_code = 1


class RequestError(ShoalError):
    """The request itself was wrong (a bad name, a bad file, a bad value); nothing was trained or served."""

    exit_code = 2


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong in a config file.

    `line` and `column` count from 1 and are None where the mistake has no place of its own.
    `path` is the key path from the file's top (`train_jobs.stdlib-lm.steps`).
    """

    file: str
    line: int | None
    column: int | None
    path: str
    given: Any
    message: str

    def __str__(self) -> str:
        place = self.file
        if self.line is not None:
            place += f":{self.line}"
            if self.column is not None:
                place += f":{self.column}"
        return f"{place}: {self.path + ': ' if self.path else ''}{self.message}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class ConfigError(RequestError):
    """The config file has mistakes; all of them are listed, in the order of the file."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))
