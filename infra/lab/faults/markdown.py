"""The table of README.md out of results: `python -m infra.lab.faults.markdown RESULT.json...`.

Of a scenario that stands in several results the last one counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.lab.faults.scenarios import SCENARIOS

_HEAD = (
    "| scenario | what happens | found, s | next step, s: median | worst | of | goes on from, steps again |",
    "|---|---|---|---|---|---|---|",
)


def markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """One row a scenario; those without a result say so, or why they were left out."""
    found = {each["name"]: each for document in documents for each in document["scenarios"]}
    return "\n".join([*_HEAD, *(_row(name, found.get(name)) for name in SCENARIOS)])


def _row(name: str, result: Mapping[str, Any] | None) -> str:
    what = SCENARIOS[name].what
    trials = result.get("trials", []) if result else []
    if not trials:
        why = (result.get("skipped") if result else None) or "not measured"
        return f"| `{name}` | {what} | | {why} | | | |"
    assert result is not None, "it has trials"
    said = sorted(trial["found_s"] for trial in trials if trial["found_s"] is not None)
    states = list(dict.fromkeys(trial["state"] for trial in trials))
    bar = f" (bar {result['bar_s']:.1f})" if result["bar_s"] is not None else ""
    wrong = "".join(f"; **{sentence}**" for sentence in result["wrong"])
    cells = (
        f"`{name}`",
        what,
        f"{said[len(said) // 2]:.1f}" if said else "",
        f"{result['median_s']:.1f}{bar}",
        f"{result['worst_s']:.1f}",
        str(len(trials)),
        f"{', '.join(states)}; {max(trial['repeated'] for trial in trials)}{wrong}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(markdown([json.loads(Path(name).read_text()) for name in sys.argv[1:]]))
