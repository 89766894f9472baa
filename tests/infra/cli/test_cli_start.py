"""The command answers at once: nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.config.template import write_template
from tests.pace import USUAL_S, at_most, used_by_children_s

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "transformers", "pyarrow", "pydantic")
PROGRAM = """
import sys
from infra.cli.main import call
code = call(sys.argv[1:])
print(",".join(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


def start(arguments: list[str]) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """Run the command; seconds on the clock, seconds of the processor, and how it ended."""
    used_s = used_by_children_s()
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        # What a user starts is compiled already: pip does it when it installs.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""},
        check=False,
    )
    return time.perf_counter() - started, used_by_children_s() - used_s, done


@pytest.mark.parametrize(("command", "limit_s"), [("--help", 0.5), ("validate", 1.0)])
def test_the_command_answers_in_time_without_heavy_imports(
    command: str, limit_s: float, tmp_path: Path
) -> None:
    config, _ = write_template(tmp_path)
    arguments = [command] if command == "--help" else [command, "-f", str(config), "--json"]
    runs = [start(arguments) for _ in range(5)]
    for *_, done in runs:
        assert done.returncode == 0
        needed = "pydantic" if command == "validate" else ""
        assert done.stderr == f"{needed}\n", "a heavy module was imported"
    if command == "validate":
        assert json.loads(runs[0][2].stdout) == {"ok": True, "errors": []}
    loops = limit_s / USUAL_S
    assert at_most(statistics.median(used_s for _, used_s, _ in runs), loops)
    # The processor does not see waiting, and the clock on a machine that is full sees the others.
    if os.getloadavg()[0] < (os.cpu_count() or 1):
        assert at_most(statistics.median(took_s for took_s, *_ in runs), loops)
