"""Requests that are sent again: by a client with its own key, or by the front whose gateway has died."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from serve_apps.openai.errors import bad_request

HEADER = "idempotency-key"
RETRIED = "x-stainless-retry-count"
"""How often OpenAI's and Anthropic's clients have sent a request before."""
MOST_CHARACTERS = 255
LATE_S = 0.05
"""A request that is so much longer on its way than others may have been sent to another gateway before. What
that one had of it until then is not worth looking for."""
WINDOW = 256
"""Requests whose way is the usual one: the last ones."""
WAIT_S = 0.3
"""How long it may take until the replicas have said what a gateway that died has left."""


@dataclass(frozen=True)
class Once:
    """A request that is to be generated once.

    Attributes:
        key: of the request; nobody else's requests have the same.
        body: the digest of what it asks.
        wait_s: how long to look for it with the replicas; None: it comes for the first time.
    """

    key: str
    body: str
    wait_s: float | None


class Repeats:
    """Knows by how long a request was on its way whether the front may have sent it before.

    The clocks of hosts are not compared: only how long requests take by them, one beside the other.

    Args:
        beside_front: the front is on this host, and so goes by this clock: the first requests that come are
            known, too.
    """

    def __init__(self, *, beside_front: bool = False) -> None:
        self._ways: deque[float] = deque([0.0] if beside_front else [], maxlen=WINDOW)

    def once(
        self,
        headers: Mapping[str, str],
        front: tuple[str, float] | None,
        tenant: str,
        path: str,
        body: bytes,
        now: float,
        *,
        streamed: bool = False,
    ) -> Once | None:
        """What a request says of itself; None: it may be generated twice.

        Args:
            front: its id and when it was sent, as the front says; None: it came by no front.
            now: Unix time.
            streamed: its answer begins with its first token; from then on the front cannot send it again, and
                what is generated for nobody would take the place of who asks.

        Raises:
            ApiError: 400, the key is none.
        """
        late = front is not None and self._is_late(now - front[1])
        given = headers.get(HEADER)
        if given is not None:
            if not 0 < len(given) <= MOST_CHARACTERS:
                raise bad_request(
                    f"The header 'Idempotency-Key' may have 1 to {MOST_CHARACTERS} characters.",
                    param="Idempotency-Key",
                    code="invalid_value",
                )
            name = ["client", tenant, given]
            again = late or headers.get(RETRIED, "0") not in ("", "0")
            wait_s: float | None = WAIT_S if again else 0.0
        elif front is not None and not streamed:
            name = ["front", front[0]]
            wait_s = WAIT_S if late else None
        else:
            return None
        return Once(_digest(json.dumps(name).encode()), _digest(path.encode() + b"\n" + body), wait_s)

    def _is_late(self, way_s: float) -> bool:
        usual = min(self._ways, default=math.inf)
        self._ways.append(way_s)
        return way_s - usual > LATE_S


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()
