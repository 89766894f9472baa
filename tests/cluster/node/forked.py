"""What the processes of test_node_fork_server.py run."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from cluster.node.shared_imports import tell_imports


def tell(path: str) -> None:
    """Write down what this process has around it."""
    shown = Path("/proc/self/environ").read_text()
    title = Path("/proc/self/cmdline").read_text().strip("\0")
    found = {
        "title": title,
        "servers_title": Path(f"/proc/{os.getppid()}/cmdline").read_text().strip("\0"),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "directory": os.getcwd(),
        "shown": dict(entry.split("=", 1) for entry in shown.split("\0") if entry),
        "mine": os.environ.get("MINE"),
        "path": sys.path,
        "value": getattr(sys.modules.get("changing"), "VALUE", None),
    }
    print("told", flush=True)
    whole = Path(path)
    whole.with_suffix(".part").write_text(json.dumps(found))
    whole.with_suffix(".part").rename(whole)


def say_and_die(lines: int) -> None:
    """Print so many lines, and come to an end that no Python sees."""
    faulthandler.enable()
    print("last words\n" * lines, end="", flush=True)
    os.abort()


def stay(path: str) -> None:
    """Tell, and end only when somebody ends it."""
    tell(path)
    time.sleep(600)


def say_and_stay() -> None:
    """Print a line that nobody flushes, and end only when somebody ends it."""
    print("said at once")
    time.sleep(600)


def import_and_tell(path: str, name: str) -> None:
    """Import a module; whether it was there already."""
    before = name in sys.modules
    with suppress(ImportError):
        importlib.import_module(name)
    tell_imports()
    Path(path).write_text(json.dumps({"had": before, "has": name in sys.modules}))


def only_say(path: str, name: str) -> None:
    """Say that a module was imported which is none."""
    sys.modules[name] = sys
    tell_imports()
    Path(path).write_text("{}")
