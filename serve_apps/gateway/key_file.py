"""The gateway's key file, read again and again."""

from __future__ import annotations

import asyncio
import logging

from cluster.config.reading.api_keys import parse_keys, read_keys
from cluster.errors import RequestError
from serve_apps.gateway.access import Access

logger = logging.getLogger(__name__)

READ_EVERY_S = 0.5


async def follow_keys(path: str, access: Access) -> None:
    """Take over what changes in a key file, until cancelled; a file that is wrong changes nothing.

    What is read twice alike counts: who writes a file in place leaves it empty, or half, for a moment.
    """
    said, known, before = "", None, None
    while True:
        await asyncio.sleep(READ_EVERY_S)
        try:
            text = await asyncio.to_thread(read_keys, path)
            is_whole, before = text == before, text
            # To parse a large file takes seconds, in which nothing else of this process gets far.
            if is_whole and text != known:
                access.keys = await asyncio.to_thread(parse_keys, text, path)
                known, said = text, ""
        except RequestError as error:
            if str(error) != said:
                said = str(error)
                logger.warning("keeping the keys as they were: %s", error)
