"""Bringing apps to the versions that their models' names have come to mean."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from cluster.errors import ShoalError
from serve_apps.controller.app import App
from serve_apps.controller.changes import follow_model
from serve_apps.controller.record import AppRecord
from serve_apps.models import follows
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 2.0
"""How often the registry is asked which versions the apps' models have now."""


async def follow_models(
    apps: Mapping[str, App],
    changing: Mapping[str, asyncio.Lock],
    newer: Callable[[AppSpec], Awaitable[AppSpec]],
    take: Callable[[AppRecord], Awaitable[int]],
) -> None:
    """Look again and again, until cancelled.

    Args:
        changing: by app: held while its record is read and changed.
        newer: the spec with the version that its model's name means now.
        take: makes a record the app's.
    """
    while True:
        await asyncio.sleep(FOLLOW_EVERY_S)
        for app in list(apps.values()):
            spec, record = app.record.wanted, app.record
            if spec is None or record.update or record.removed or not follows(spec.config.model):
                continue
            try:
                found = await newer(spec)
            except ShoalError as error:
                logger.warning("%s: its model cannot be looked up: %s", spec.name, error)
                continue
            async with changing[spec.name]:
                changed = follow_model(record, found, time.time())
                if app.record is record and changed != record:
                    await take(changed)
