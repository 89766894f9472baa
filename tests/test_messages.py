"""What people are told can be acted on: who is sent to a log is told which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = ("cluster", "train_jobs", "serve_apps", "infra")
LABORATORY = ROOT / "infra" / "lab"
"""Its texts describe experiments."""
NAMES_ONE = re.compile(r"\bshoal logs \{|logs_of\(|\bin \{.*(directory|path|location)")
"""The command with a name in it, the helper that makes it, or the place of a file."""
SENDS_NOBODY = re.compile(r"job log of Philly|of the log has no readable")
"""A file that the user named."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every text of a file that is no docstring, with what is filled in as {expression}, by line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (
                f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else _constant(part)
                for part in node.values
            )
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def _constant(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def names_no_log(text: str) -> bool:
    """Whether a sentence sends people to a log, and does not say to which."""
    is_sentence = " " in text.strip()
    sends = re.search(r"\blogs?\b(?!-)", re.sub(r"\{.*?\}", "", text), re.IGNORECASE) is not None
    return is_sentence and sends and not NAMES_ONE.search(text) and not SENDS_NOBODY.search(text)


def test_no_message_sends_to_a_log_without_naming_it() -> None:
    files = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    assert len(files) > 100
    nameless = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files
        if LABORATORY not in path.parents
        for line, text in texts(path)
        if names_no_log(text) and not text.startswith("/")  # a path of the API
    ]
    assert nameless == []


def test_what_names_none_would_be_found(tmp_path: Path) -> None:
    source = tmp_path / "one.py"
    source.write_text(
        '"""Logs of all kinds."""\n'
        'raise E("The gateway failed; see its log.")\n'
        'raise E(f"{name} failed, its logs say more")\n'
        'raise E(f"{name} failed; {logs_of(name)} says why")\n'
        'raise E(f"see `shoal logs {name}`")\n'
        'x = "logs"\n'
    )
    assert [line for line, text in texts(source) if names_no_log(text)] == [2, 3]
