"""A task whose ranks die as they start, as long as a file lies there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from infra.lab.faults.task import Task as SteadyTask


class Task(SteadyTask):
    """`settings`: those of the task it derives from, and the path that is `fatal`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if Path(config.settings["fatal"]).exists():
            os.kill(os.getpid(), signal.SIGKILL)
