"""What is wrong with a job of task `script`: what it runs, where, and what it has no use for."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.config.checks.ground import MistakeReport, path_problem
from cluster.config.sections.section import Section
from cluster.config.sections.train import TrainJobConfig

_OF_SCRIPTS = ("script", "module", "cwd", "progress", "arguments")
_USED = frozenset(
    {
        *_OF_SCRIPTS,
        *("task", "priority", "weight", "accelerator", "env", "pip", "working_dir", "exclude", "publish"),
        *("workers.min", "workers.max", "workers.per_node", "workers.cpus", "workers.gpus"),
        *(
            f"recovery.{key}"
            for key in (
                *("worker_failures", "node_failures", "hangs", "start_failures", "memory_failures"),
                *("transient_errors", "retry", "hang_timeout_s", "start_timeout_s", "save_timeout_s"),
            )
        ),
    }
)
"""Keys of a job that have an effect under task `script`."""


def check_script(job: TrainJobConfig, folder: Path, report: MistakeReport) -> None:
    """Report what is wrong with a script, and every key that does nothing beside the job's task.

    Args:
        folder: what travels with the job.
    """
    if job.task != "script":
        for key in _OF_SCRIPTS:
            if value := getattr(job, key):
                report(key, value, f"has a meaning under task script only, not under task {job.task}", "task")
        return
    for key, value in _idle(job):
        message = "has no effect under task script: what is trained, and how, says the script"
        report(key, value, message, "task")
    if job.settings:
        message = "is for tasks of yours (`your.module:Task`), not under task script"
        report("settings", job.settings, message, "task")
    if job.script is None and job.module is None:
        message = "should name the script to run, a path from the folder that travels (or `module` one)"
        report("script", None, message, "task", "module")
    if job.script is not None and job.module is not None:
        report("module", job.module, "should not be there beside `script`: a job runs one of them", "script")
    for key, path, problem_of in (("script", job.script, _script_problem), ("cwd", job.cwd, folder_problem)):
        problem = None if path is None else _outside(path, folder) or problem_of(folder / path)
        if problem is not None:
            report(key, path, f"`{path}` {problem}")
    if job.module is not None:
        problem = _module_problem(job.module, folder / (job.cwd or ""))
        if problem is not None:
            report("module", job.module, f"`{job.module}` {problem}", "cwd")


def _idle(job: TrainJobConfig) -> Iterator[tuple[str, Any]]:
    """The keys that say something, and that nobody reads."""

    def look(section: Section, default: Section, where: str) -> Iterator[tuple[str, Any]]:
        for name, field in type(section).model_fields.items():
            key = f"{where}{field.alias or name}"
            value, usual = getattr(section, name), getattr(default, name)
            if key in _USED or key == "settings":
                continue
            if isinstance(value, Section) and isinstance(usual, Section):
                yield from look(value, usual, f"{key}.")
            elif value != usual:
                yield key, value

    return look(job, TrainJobConfig(), "")


def _outside(path: str, folder: Path) -> str | None:
    # By its name: what a link leads to travels.
    if Path(os.path.normpath(folder / path)).is_relative_to(os.path.normpath(folder)):
        return None
    return f"is not below {folder}, which is what travels to the nodes; `working_dir` names another folder"


def folder_problem(path: Path) -> str | None:
    """Why a path is no folder."""
    return path_problem(str(path)) or (None if path.is_dir() else "is no directory")


def _script_problem(path: Path) -> str | None:
    """Why a script cannot run; None where nothing seems wrong."""
    problem = path_problem(str(path))
    if problem is not None:
        return problem
    return "is a directory" if path.is_dir() else _python_problem(path)


def _module_problem(module: str, folder: Path) -> str | None:
    """The same of a module; one that is not in the folder is taken for one of a package."""
    path = folder.joinpath(*module.split("."))
    if path.is_dir():
        main = path / "__main__.py"
        return _python_problem(main) if main.is_file() else "is a package without a __main__.py"
    file = path.with_suffix(".py")
    return _python_problem(file) if file.is_file() else None


def _python_problem(file: Path) -> str | None:
    source = file.read_bytes()
    first = source.partition(b"\n")[0]
    if file.suffix in (".sh", ".bash") or (first.startswith(b"#!") and b"python" not in first):
        return (
            "is a shell script, and what runs is Python: name what it starts as `script` or `module`, the"
            " rest of its command line as `arguments`, and what it exports as `env`"
        )
    try:
        ast.parse(source, file.name)
    except SyntaxError as error:
        return f"is no Python: {error.msg} (line {error.lineno})"
    except ValueError as error:
        return f"is no Python: {error}"
    return None
