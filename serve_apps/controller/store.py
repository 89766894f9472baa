"""The controller's memory: a record of each app in the storage, so that one that was killed goes on."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cluster.files.backend import MissingError
from cluster.files.storage import Storage
from serve_apps.controller.record import AppRecord

SERVING = "serving"
_RECORD = "app.json"
_EVENTS = "events.jsonl"
KEPT_EVENTS = 100
"""Events of an app that are kept where the storage cannot append."""


class AppStore:
    """The records and events of one cluster's apps, in `<storage>/serving/<cluster>/<app>/`.

    Args:
        cluster_id: what a former cluster of the same name has left is not taken for this one's.
    """

    def __init__(self, storage: Storage, cluster: str, cluster_id: str) -> None:
        self._storage = storage.child(SERVING, cluster)
        self._cluster_id = cluster_id
        self._events: dict[str, deque[str]] = {}

    def load(self) -> dict[str, AppRecord]:
        """The apps of this cluster, those that are gone too."""
        records = {}
        for name in self._storage.list():
            try:
                document = json.loads(self._storage.read_bytes(f"{name}/{_RECORD}"))
            except MissingError:
                continue
            if document.pop("cluster_id") == self._cluster_id:
                records[name] = AppRecord.from_json(document)
        return records

    def save(self, record: AppRecord) -> None:
        document = {"cluster_id": self._cluster_id, **record.as_json()}
        self._storage.write_bytes(f"{record.name}/{_RECORD}", json.dumps(document, indent=1).encode())

    def event(self, name: str, kind: str, facts: Mapping[str, Any]) -> None:
        """Add a line to an app's events."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "kind": kind, **facts})
        path = f"{name}/{_EVENTS}"
        if self._storage.appendable:
            self._storage.append_lines(path, [line])
            return
        kept = self._events.get(name)
        if kept is None:
            # Those that a former controller has written.
            before = [json.dumps(event) for event in self.events(name)]
            kept = self._events[name] = deque(before, maxlen=KEPT_EVENTS)
        kept.append(line)
        self._storage.write_bytes(path, "".join(f"{each}\n" for each in kept).encode())

    def events(self, name: str) -> list[dict[str, Any]]:
        """What was logged of an app, oldest first."""
        path = f"{name}/{_EVENTS}"
        if not self._storage.exists(path):
            return []
        # A line that was cut off by a crash has no end; it does not count.
        lines = self._storage.read_bytes(path).decode().split("\n")[:-1]
        return [json.loads(line) for line in lines]
