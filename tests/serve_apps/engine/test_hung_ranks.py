"""A rank that hangs is found, also while nobody asks anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_apps.engine.protocol import EngineError


def test_a_rank_that_hangs_while_nobody_asks_is_noticed(
    start_replica: Callable[..., Any], llama: Path
) -> None:
    replica = start_replica(llama, extra={"step_timeout_s": 2.0, "heartbeat_s": 0.2})
    os.kill(replica.follower.pid, signal.SIGSTOP)

    def broken() -> bool:
        try:
            replica.asker.engine.check()
        except EngineError:
            return True
        return False

    replica.asker.run(replica.asker.until(broken))
    replica.follower.kill()
