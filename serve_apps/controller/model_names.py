"""Bringing apps to the versions that their models' names have come to mean."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from cluster.errors import ShoalError
from serve_apps.controller.app import App
from serve_apps.controller.changes import follow_model
from serve_apps.controller.record import AppRecord
from serve_apps.controller.threads import Threads
from serve_apps.models import find_model, follows

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 2.0
"""How often the registry is asked which versions the apps' models have now."""


async def follow_models(
    apps: Mapping[str, App],
    changing: Mapping[str, asyncio.Lock],
    threads: Threads,
    storage: str,
    take: Callable[[AppRecord], Awaitable[int]],
) -> None:
    """Look again and again, until cancelled.

    Args:
        changing: by app: held while its record is read and changed.
        storage: where the models' registry is.
        take: makes a record the app's.
    """
    while True:
        await asyncio.sleep(FOLLOW_EVERY_S)
        for app in list(apps.values()):
            spec, record = app.record.wanted, app.record
            if spec is None or record.update or record.removed or not follows(spec.config.model):
                continue
            try:
                found = await threads.ask_registry(partial(find_model, spec.name, spec.config, storage))
            except ShoalError as error:
                logger.warning("%s: its model cannot be looked up: %s", spec.name, error)
                continue
            found = replace(found, engine=spec.engine)
            async with changing[spec.name]:
                changed = follow_model(record, found, time.time())
                if app.record is record and changed != record:
                    await take(changed)
