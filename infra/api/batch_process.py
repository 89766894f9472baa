"""A batch of offline inference, in a process of its own on the head: `python -m infra.api.batch_process`.

It is asked on standard input, and ends when that does: whoever wants the batch is gone then. Run again, it
goes on where it ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from dataclasses import asdict
from types import FrameType
from typing import Any, TextIO

from cluster.actors import NAMESPACE
from cluster.config.sections.root import ShoalConfig
from cluster.errors import RequestError, ShoalError
from serve_apps.batch.progress import Progress, View
from serve_apps.batch.request import BatchRequest


class _TellingView(View):
    """Writes a JSON document a line: `progress` and `note`."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def show(self, progress: Progress) -> None:
        self.tell("progress", asdict(progress))

    def say(self, text: str) -> None:
        self.tell("note", {"text": text})

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        self._out.write(json.dumps({"kind": kind, "data": data}) + "\n")
        self._out.flush()


def main() -> None:
    """Run what is asked; at last a line `end` with the result, or `failed`."""
    import ray

    from serve_apps.batch.run import run_and_leave

    asked = json.loads(sys.stdin.readline())
    view = _TellingView(sys.stdout)
    try:
        ray.init(
            address=asked["address"],
            namespace=NAMESPACE,
            runtime_env={"env_vars": asked["env"]},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        signal.signal(signal.SIGTERM, _interrupt)  # Ray has put one of its own there
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
        config = ShoalConfig.model_validate({"serve_apps": {asked["name"]: asked["config"]}})
        result = run_and_leave(config, asked["name"], BatchRequest(**asked["request"]), view)
    except RequestError as error:
        view.tell("failed", {"message": str(error), "request": True})
    except ShoalError as error:
        view.tell("failed", {"message": str(error), "request": False})
    except KeyboardInterrupt:
        sys.exit(1)
    else:
        view.tell("end", result)


def question(address: str, env: dict[str, str], name: str, config: Any, request: BatchRequest) -> bytes:
    """What such a process is asked.

    Args:
        address: HOST:PORT of Ray's control store.
        env: variables of all that is Shoal's there.
        config: the app's section of the config, as JSON.
    """
    asked = {"address": address, "env": env, "name": name, "config": config, "request": asdict(request)}
    return (json.dumps(asked) + "\n").encode()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_with_standard_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
