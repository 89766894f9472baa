"""Nothing but the embedded provider may take one machine for all of a cluster."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("cluster", "train_jobs", "serve_apps", "infra")
EMBEDDED = ROOT / "cluster/hosts/embedded"
LABORATORIES = ROOT / "infra/lab"
"""They make hosts and faults on this machine, and measure on it."""
FORBIDDEN = {
    "a loopback address": (r"\b127\.\d|::1\b|\blocalhost\b", {"cluster/loopback.py"}),
    "/tmp": (r"(?<![\w/])/tmp\b", set()),
    "the process table": (
        r"process_iter|psutil\.pids|pid_exists|net_connections|listdir\(\"/proc\"\)|\"ps\"",
        # What was started on a node ends with it, and counts there, whoever its parent is by now.
        {"cluster/node/sessions.py", "cluster/node/memory.py", "cluster/hosts/processes.py"},
    ),
}
"""What names it, and the files that may."""


def code_of(path: Path) -> Iterator[tuple[int, str]]:
    """The tokens of a file but for its comments and its docstrings, with their lines."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
            if not docstring:
                yield token.start[0], token.string


def named(path: Path, pattern: str) -> list[int]:
    """The lines of a file that name something."""
    lines: dict[int, str] = {}
    for line, text in code_of(path):
        lines[line] = lines.get(line, "") + text
    return [line for line, text in lines.items() if re.search(pattern, text)]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_only_the_embedded_provider_names(what: str) -> None:
    pattern, allowed = FORBIDDEN[what]
    files = [
        path
        for floor in FLOORS
        for path in sorted((ROOT / floor).rglob("*.py"))
        if EMBEDDED not in path.parents and LABORATORIES not in path.parents
    ]
    found = {str(path.relative_to(ROOT)): lines for path in files if (lines := named(path, pattern))}
    assert {file: lines for file, lines in found.items() if file not in allowed} == {}
    assert found.keys() == allowed, "what may name it does"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('HOST = "127.0.0.1"', "a loopback address"),
        ('bind(("localhost", 0))', "a loopback address"),
        ('Path("/tmp/shoal")', "/tmp"),
        ("psutil.process_iter()", "the process table"),
        ('os.listdir("/proc")', "the process table"),
    ],
)
def test_the_rules_see_what_they_forbid(line: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text(f'"""127.0.0.1 in /tmp, process_iter."""\n\n# localhost\n{line}\n')
    assert {each: named(path, pattern) for each, (pattern, _) in FORBIDDEN.items()} == {
        each: [4] if each == what else [] for each in FORBIDDEN
    }
