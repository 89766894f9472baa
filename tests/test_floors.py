"""The house keeps its floors: imports run downwards only, and nothing private of Ray is used in the open."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"cluster": 0, "train_jobs": 1, "serve_apps": 1, "infra": 2}
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
PRIVATE_SAYS_SO = "private"
"""A file that uses what is private of Ray says so in its docstring."""


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here, so that the floors can be seen"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of a chain of plain names, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def attributes(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that a file uses (`ray.experimental.x`)."""
    names = (dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    yield from (name for name in names if name is not None)


def violations(package: str, source: str) -> list[str]:
    """What a file of `package` imports against the floors."""
    found = []
    for module in imported_modules(ast.parse(source)):
        other = module.split(".")[0]
        if other in FLOORS and other != package and FLOORS[other] >= FLOORS[package]:
            found.append(module)
    return found


def private_of_ray(source: str) -> list[str]:
    """What a file uses of Ray that begins with an underscore."""
    tree = ast.parse(source)
    names = [*imported_modules(tree), *attributes(tree)]
    return [
        name
        for name in names
        if name.split(".")[0] == "ray" and any(part.startswith("_") for part in name.split("."))
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards_only(path: Path) -> None:
    assert violations(path.relative_to(ROOT).parts[0], path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_private_of_ray_sits_in_files_that_say_so(path: Path) -> None:
    source = path.read_text()
    if private_of_ray(source):
        docstring = ast.get_docstring(ast.parse(source)) or ""
        assert PRIVATE_SAYS_SO in docstring, private_of_ray(source)


def test_the_rules_see_what_they_forbid() -> None:
    assert violations("cluster", "def f():\n    from train_jobs.loop import StepLoop")
    assert violations("serve_apps", "import train_jobs")
    assert violations("train_jobs", "from serve_apps import app")
    assert violations("cluster", "import infra.cli.main")
    assert not violations("infra", "import cluster, train_jobs.loop\nfrom serve_apps import app")
    assert private_of_ray("from ray._private.state import x")
    assert private_of_ray("import ray\nray._private.worker.f()")
    assert private_of_ray("from ray.serve._private import y")
    assert not private_of_ray("import ray\nray.get(x)\nself._ray.thing\nray.remote(_Mine).remote()")


def test_the_top_level_of_the_repository_holds_what_it_should() -> None:
    allowed = {*FLOORS, "tests", "pyproject.toml", "README.md", "LICENSE"}
    tracked = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    extra = {
        name for name in tracked - allowed if not name.endswith(".egg-info") and name not in ("build", "dist")
    }
    assert extra == set()
