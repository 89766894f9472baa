"""The control APIs that a person uses from here, by name, and which of them is the current one.

~/.config/shoal/contexts.json     0600; $XDG_CONFIG_HOME, where it is set, is in the place of ~/.config
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.errors import RequestError, ShoalError
from cluster.state.state_directory import config_root, require_private, write_private
from infra.api.client import Endpoint

FILE = "contexts.json"


@dataclass(frozen=True)
class Context:
    """A control API that somebody else's cluster has.

    Attributes:
        cluster: what it calls itself.
        token: the token, or `token_file` names the file that holds it.
        authority: a file with certificates to trust beside those of the system.
    """

    url: str
    cluster: str
    token: str | None = None
    token_file: str | None = None
    authority: str | None = None

    def endpoint(self) -> Endpoint:
        """Where it is, and what opens it.

        Raises:
            ShoalError: the token's file cannot be read.
        """
        token = self.token if self.token_file is None else read_token(self.token_file)
        return Endpoint(self.url, token or "", self.authority)


@dataclass(frozen=True)
class Contexts:
    """All of them."""

    current: str | None = None
    known: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """One of them.

        Raises:
            RequestError: there is none of this name.
        """
        if name not in self.known:
            there = ", ".join(self.known) or "none"
            raise RequestError(
                f"there is no context {name!r}; there are: {there}. `shoal connect URL` makes one"
            )
        return self.known[name]


def read_token(file: str) -> str:
    """The token that a file holds.

    Raises:
        ShoalError: it cannot be read, or holds none.
    """
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ShoalError(f"the token in {file} cannot be read: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise ShoalError(f"{file} should hold a token, and nothing else")
    return token


def read_contexts() -> Contexts:
    """All contexts.

    Raises:
        ShoalError: their file cannot be read.
    """
    path = config_root() / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {name: Context(**values) for name, values in found["contexts"].items()}
        return Contexts(found["current"], known)
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShoalError(
            f"{path} cannot be read ({error}); `shoal connect` writes it anew once it is gone"
        ) from error


def write_contexts(contexts: Contexts) -> None:
    """Keep them.

    Raises:
        ShoalError: their directory cannot be made, or is open to others.
    """
    directory = config_root()
    require_private(directory)
    known = {name: asdict(context) for name, context in contexts.known.items()}
    document = {"current": contexts.current, "contexts": known}
    write_private(directory / FILE, json.dumps(document, indent=2) + "\n")
