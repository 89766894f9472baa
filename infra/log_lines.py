"""Lines of an app's processes, as they wrote them and as people read them; no Ray.

How Ray marks the lines that it writes for itself is private: where it changes, they are shown as lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""How lines begin that Ray writes for itself."""


@dataclass(frozen=True)
class Origin:
    """The process that wrote a line."""

    kind: str
    """`gateway`, `replica`, or `rank` (a tensor-parallel rank beside rank 0, which writes where its replica
    does, and says so)."""
    replica: str
    """The replica's id; the gateway's own, too."""
    rank: int | None = None

    @property
    def prefix(self) -> str:
        """What stands before its lines."""
        if self.kind == "gateway":
            return "[gateway]"
        return f"[{self.replica}]" if self.rank is None else f"[{self.replica} rank {self.rank}]"

    def of(self, line: LogLine) -> Origin:
        """The process that wrote this line, among those that write where this one does."""
        rank = None if line.document is None else line.document.get("rank")
        return self if rank is None else Origin("rank", self.replica, rank)

    def as_json(self) -> dict[str, Any]:
        return {"source": self.kind, "replica": self.replica, "rank": self.rank}


@dataclass(frozen=True)
class LogLine:
    """One line, and what is known of it: a document where it is JSON of ours."""

    text: str
    document: Mapping[str, Any] | None

    @classmethod
    def read(cls, text: str) -> LogLine | None:
        """A line as it was written; None where it is one of Ray's own marks."""
        if text.startswith(MARKS) or not text:
            return None
        document = None
        if text.startswith("{"):
            with suppress(ValueError):  # somebody else's text
                document = json.loads(text)
        return cls(text, document if isinstance(document, dict) and "time" in document else None)

    @property
    def request_id(self) -> str | None:
        """The request under which it was written, as its client knows it."""
        return None if self.document is None else self.document.get("request_id")

    def is_of(self, app: str) -> bool:
        """Whether it may be about this app: it names no other one."""
        return self.document is None or self.document.get("app") in (None, app)

    def is_about(self, request_id: str) -> bool:
        """Whether it was written under a request, or names it."""
        if self.request_id is not None:
            return self.request_id == request_id
        return re.search(rf"(?<![\w-]){re.escape(request_id)}(?!\w)", self.text) is not None

    def shown(self) -> str:
        """For people: local time, what happened, and the request's id at the end."""
        line = self.document
        if line is None:
            return self.text
        time = datetime.fromisoformat(line["time"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
        if "message" in line:
            said = f"{line.get('level', '')} {line['message']}"
        elif "endpoint" in line:
            facts = ("app", "tenant", "model_version", "prompt_tokens", "completion_tokens", "error")
            named = [f"{fact}={line[fact]}" for fact in facts if line.get(fact) is not None]
            replicas = [f"replicas={','.join(line['replicas'])}"] if line.get("replicas") else []
            said = (
                f"{line.get('method')} {line['endpoint'] or '?'} {line.get('status')} {line.get('seconds')} s"
            )
            said = " ".join([said, *named, *replicas])
        else:
            return self.text
        request = f" (request {self.request_id})" if self.request_id else ""
        trace = line.get("traceback")
        return f"{time} {said}{request}" + (f"\n{trace}" if trace else "")
