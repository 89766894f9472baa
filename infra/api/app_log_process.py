"""What an app's processes write, read in a process of its own: `python -m infra.api.app_log_process`.

Ray hands out what a process writes to a thread that waits for it, however long that takes. So whoever follows
an app has a process here, which is killed when nobody follows any more.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.state.record import ClusterRecord
from infra.app_logs import AppLogs, Wanted, Written


def main() -> None:
    """Read from standard input what is wanted; write a JSON document a line: `line`, `note`, or `failed`."""
    asked = json.loads(sys.stdin.readline())
    record, wanted = ClusterRecord(**asked["record"]), Wanted(**asked["wanted"])
    seen: Counter[str] = Counter()

    def tell(kind: str, data: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"kind": kind, "data": data}) + "\n")
        sys.stdout.flush()

    def emit(written: Written) -> None:
        line = written.line
        said = line.text if line.document is None else line.document
        request_id = line.request_id or wanted.request
        shown = {**written.origin.as_json(), "request_id": request_id, "line": said}
        tell("line", {"log": written.log, "number": written.number, "line": shown})

    def say(text: str) -> None:
        seen[text] += 1
        if seen[text] == 1:
            tell("note", {"text": text})

    try:
        logs = AppLogs(record, joined=True)
        if asked["follow"]:
            logs.follow(wanted, emit, say, asked["past"])
        else:
            logs.read(wanted, emit, say)
    except RequestError as error:
        tell("failed", {"message": str(error), "request": True})
    except ShoalError as error:
        tell("failed", {"message": str(error), "request": False})


def question(record: ClusterRecord, wanted: Wanted, follow: bool, past: Mapping[str, int]) -> bytes:
    """What such a process is asked.

    Args:
        past: how many lines of each output are known.
    """
    asked = {"record": {**asdict(record), "nodes": ()}, "wanted": asdict(wanted)}
    return (json.dumps({**asked, "follow": follow, "past": dict(past)}) + "\n").encode()


if __name__ == "__main__":
    main()
