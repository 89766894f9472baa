"""The gateway's key file, read again and again."""

from __future__ import annotations

import asyncio
import logging

from cluster.api_keys import load_keys
from cluster.errors import RequestError
from serve_apps.gateway.access import Access

logger = logging.getLogger(__name__)

READ_EVERY_S = 0.5


async def follow_keys(path: str, access: Access) -> None:
    """Take over what changes in a key file, until cancelled; a file that is wrong changes nothing."""
    said = ""
    while True:
        await asyncio.sleep(READ_EVERY_S)
        try:
            access.keys = await asyncio.to_thread(load_keys, path)
            said = ""
        except RequestError as error:
            if str(error) != said:
                said = str(error)
                logger.warning("keeping the keys as they were: %s", error)
