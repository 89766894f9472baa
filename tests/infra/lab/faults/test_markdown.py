"""The README's table names every scenario, and comes out of what was measured."""

from __future__ import annotations

from pathlib import Path

import infra.lab.faults
from infra.lab.faults.markdown import markdown
from infra.lab.faults.scenarios import SCENARIOS


def test_the_readme_has_a_row_for_every_scenario_as_it_describes_itself_and_no_other() -> None:
    readme = Path(infra.lab.faults.__file__).with_name("README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    described = [f"| `{each.name}` | {each.what} |" for each in SCENARIOS.values()]
    assert ["|".join(row.split("|")[:3]) + "|" for row in rows] == described


def test_a_row_holds_median_worst_and_what_was_wrong() -> None:
    trials = [{"found_s": at, "state": "checkpoint", "repeated": again} for at, again in ((1.0, 9), (3.0, 2))]
    result = {"name": "rank-killed", "median_s": 8.0, "worst_s": 9.5, "bar_s": 9.1, "trials": trials}
    left_out = {"name": "disk-full", "skipped": "mounting is root's"}
    rows = markdown([{"scenarios": [{**result, "wrong": ["a lease is left"]}, left_out]}]).splitlines()
    (row,) = [row for row in rows if row.startswith("| `rank-killed` |")]
    assert "| 3.0 | 8.0 (bar 9.1) | 9.5 | 2 | checkpoint; 9; **a lease is left** |" in row
    (row,) = [row for row in rows if row.startswith("| `disk-full` |")]
    assert "mounting is root's" in row
    assert sum("not measured" in row for row in rows) == len(SCENARIOS) - 2
