"""The gateways' key file on the head, read again and again; they are told what it holds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

from cluster.config.reading.api_keys import parse_keys, read_keys
from cluster.errors import RequestError

logger = logging.getLogger(__name__)

READ_EVERY_S = 0.5


class KeyFile:
    """The keys of a cluster's gateways.

    Args:
        source: the file, or the environment variable, see `load_keys`; None: they need none.
    """

    def __init__(self, source: str | None) -> None:
        self._source = source
        self._known: dict[str, Any] | None = None
        self.failure = ""
        """Why it cannot be read now: the keys stay as they were."""

    def told(self, digest: str) -> dict[str, Any] | None:
        """`digest` and `entries` for a gateway that has those of another digest; None: nothing new."""
        return None if self._known is None or self._known["digest"] == digest else self._known

    async def follow(self) -> None:
        """Take over what changes, until cancelled; a file that is wrong changes nothing.

        What is read twice alike counts: who writes a file in place leaves it empty, or half, for a moment. Of
        a process that has just begun the first counts, since gateways may wait for it.
        """
        if self._source is None:
            await asyncio.Event().wait()
            return
        text, before = None, None
        while True:
            try:
                before, text = text, await asyncio.to_thread(read_keys, self._source)
                if self._known is None or text == before:
                    await self._take(text)
            except RequestError as error:
                if str(error) != self.failure:
                    self.failure = str(error)
                    logger.warning("keeping the keys as they were: %s", error)
            await asyncio.sleep(READ_EVERY_S)

    async def _take(self, text: str) -> None:
        assert self._source is not None
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self._known is None or digest != self._known["digest"]:
            # To parse a large file takes seconds, in which nothing else of this process gets far.
            ring = await asyncio.to_thread(parse_keys, text, self._source)
            self._known = {"digest": digest, "entries": ring.as_json()}
        self.failure = ""
