"""A task of the user's, looked up without being imported: validation runs no code of theirs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

METHODS = ("build", "samples", "loss")
"""What every task has."""


def task_problem(task: str, folder: Path) -> str | None:
    """Why `module:Class` is no task, as far as its source tells; None where nothing seems wrong.

    Args:
        folder: where modules are looked for before the installed ones.
    """
    module, _, name = task.partition(":")
    path = folder.joinpath(*module.split("."))
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    if file is None:
        top = module.split(".")[0]
        own = (folder / top / "__init__.py").exists() or (folder / f"{top}.py").exists()
        if not own and (top in sys.modules or find_spec(top) is not None):
            return None  # Python too passes over a directory that is no package, if an installed one is
        if own or (folder / top).exists():
            return f"should name a module: in {folder} there is `{top}`, but no {module}"
        return f"names the module `{module}`, which is neither in {folder} nor installed"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return f"names {file.name}, which Python cannot read: {error.msg} (line {error.lineno})"
    except (OSError, ValueError) as error:
        return f"names {file.name}, which cannot be read: {error}"
    names = set(_names(tree))
    if "*" in names or "__getattr__" in names:
        return None
    if name not in names:
        close = get_close_matches(name, names, 1)
        return f"names `{name}`, which {file.name} does not define" + (
            f"; did you mean `{close[0]}`?" if close else ""
        )
    return _lacks(tree, name)


def _names(tree: ast.Module) -> Iterator[str]:
    """Every name that the module may bind at its top; some more do no harm."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _lacks(tree: ast.Module, name: str) -> str | None:
    """The methods that a class which derives from nothing lacks."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            if node.bases or node.keywords or node.decorator_list:
                return None
            own = set(_names(ast.Module(node.body, [])))
            missing = [f"`{method}`" for method in METHODS if method not in own]
            return f"names a class without {' and '.join(missing)}" if missing else None
    return None
