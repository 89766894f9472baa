"""A task of the user's is looked up in its source; none of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes, position

WHOLE = """
raise SystemExit("validation must not run this")
class Task:
    def build(self): ...
    def samples(self, held_out): ...
    loss = print
class Half:
    def build(self): ...
class Derived(Base): ...
Made = type("Made", (), {})
from other import Taken
"""


def write_modules(directory: Path) -> None:
    (directory / "mine.py").write_text(WHOLE)
    (directory / "torn.py").write_text("class Task:\n    def build(self)\n")
    (directory / "starred.py").write_text("from other import *\n")
    (directory / "pytest").mkdir()
    (directory / "bare").mkdir()
    (directory / "package").mkdir()
    (directory / "package" / "__init__.py").write_text("def __getattr__(name): ...\n")
    (directory / "package" / "inner.py").write_text(WHOLE)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("nowhere:Task", "names the module `nowhere`, which is neither in {folder} nor installed"),
        ("mine.inner:Task", "in {folder} there is `mine`, but no mine.inner"),
        ("bare.inner:Task", "in {folder} there is `bare`, but no bare.inner"),
        ("package.outer:Task", "in {folder} there is `package`, but no package.outer"),
        ("mine:Tusk", "names `Tusk`, which mine.py does not define; did you mean `Task`?"),
        ("mine:Half", "names a class without `samples` and `loss`"),
        ("package.inner:Other", "names `Other`, which inner.py does not define"),
        ("torn:Task", "names torn.py, which Python cannot read: expected ':' (line 2)"),
    ],
)
def test_what_cannot_be_a_task(task: str, words: str, tmp_path: Path) -> None:
    write_modules(tmp_path)
    text = f"train_jobs:\n  j: {{task: '{task}'}}\n"
    (found,) = mistakes(tmp_path, text)
    assert (found.line, found.column) == position(text, f"'{task}'")
    assert found.path == "train_jobs.j.task"
    assert words.replace("{folder}", str(tmp_path)) in found.message


@pytest.mark.parametrize(
    "task",
    [
        *("mine:Task", "mine:Derived", "mine:Made", "mine:Taken"),
        *(
            "starred:Anything",
            "package:Anything",
            "package.inner:Task",
            "pytest:Anything",
            "pytest.inner:Anything",
        ),
    ],
)
def test_what_may_be_a_task(task: str, tmp_path: Path) -> None:
    write_modules(tmp_path)
    load(tmp_path, f"train_jobs:\n  j: {{task: '{task}'}}\n")
