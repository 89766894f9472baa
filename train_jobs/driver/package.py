"""What travels to the cluster with a job: the files of its folder, but those that are left out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from pathspec import GitIgnoreSpec

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from cluster.state.state_directory import config_root, state_root
from cluster.wording import counted

MOST_BYTES = 100 * 2**20
"""Ray's job API takes no larger package."""
IGNORE_FILES = (".gitignore", ".rayignore", ".shoalignore")
"""Files of patterns, in git's syntax; each is for its own directory and those below it."""
NEVER = (".git", ".hg", ".svn", "__pycache__", ".venv", ".ipynb_checkpoints")
"""Names that no job needs."""
_NAMED = "the config, which names it by its path"
_SHOWN = 5


@dataclass(frozen=True)
class Package:
    """A folder, looked through.

    Attributes:
        base: the folder.
        files: what travels, paths from it.
        size_bytes: of all that.
        left_out: what does not, by the reason; the topmost directories, or files.
    """

    base: Path
    files: tuple[str, ...] = ()
    size_bytes: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def check(self) -> None:
        """See that it is not too large to travel.

        Raises:
            RequestError: it is; the message names what is largest.
        """
        if self.size_bytes > MOST_BYTES:
            largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for name, size in self.largest)
            raise RequestError(
                f"{self.base} is too large to travel: {self.size_bytes / 2**20:.0f} MiB in"
                f" {counted(len(self.files), 'file')}, of at most {MOST_BYTES // 2**20}. The largest in it:"
                f" {largest}. What a job does not need is left out by .shoalignore, or by its `exclude`"
            )

    @cached_property
    def largest(self) -> list[tuple[str, int]]:
        """The largest entries of the folder, with their bytes."""
        sizes: dict[str, int] = {}
        for path in self.files:
            top = PurePosixPath(path).parts[0]
            sizes[top] = sizes.get(top, 0) + (self.base / path).stat().st_size
        return sorted(sizes.items(), key=lambda item: -item[1])[:_SHOWN]

    def sentences(self) -> list[str]:
        """What travels and what does not, for a person."""
        travel = "travels" if len(self.files) == 1 else "travel"
        said = [f"{counted(len(self.files), 'file')} {travel}, {_show(self.size_bytes)}"]
        for reason, names in self.left_out.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            said.append(f"left out by {reason}: {', '.join(names[:_SHOWN])}{more}")
        return said

    def copy(self, target: Path) -> None:
        """Put the files into a new directory; by links where that can be."""
        for path in self.files:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link((self.base / path).resolve(), target / path)
            except OSError:
                shutil.copy2(self.base / path, target / path)


def package_of(config: TrainJobConfig, base: Path, others: Collection[Path] = ()) -> Package:
    """What travels of a folder for one job.

    Left out is what the files of patterns say, and the job's `exclude`; the directories that the config names
    by path (data, a model), which are read where they lie; the storage; and what Shoal knows of clusters,
    tokens among it, where the folder is the user's home. What a script names in its arguments travels
    whatever git ignores, and so does the program of the job: they would be missed there. Links are followed.

    Args:
        base: the folder of the config file.
        others: directories that never travel (the storage).
    """
    base = base.resolve()
    named = _named(config)
    where_they_lie = dict.fromkeys(named, _NAMED)
    where_they_lie |= {str(path.resolve()): "Shoal: its storage" for path in others}
    with suppress(ShoalError):  # no home, and so nothing of it
        where_they_lie |= {str(root().resolve()): "Shoal: its own" for root in (state_root, config_root)}
    wanted = _wanted(config, base)
    exclude = GitIgnoreSpec.from_lines(config.exclude)
    left_out: dict[str, list[str]] = {}
    files: list[str] = []
    size = 0

    def reason_for(path: Path, relative: str, specs: Sequence[tuple[str, str, GitIgnoreSpec]]) -> str | None:
        name = f"{relative}/" if path.is_dir() else relative
        if path.name in NEVER:
            return ""
        if not path.exists():
            return "Shoal: a link that leads nowhere"
        lies = str(path.resolve())
        if lies in where_they_lie or any(fnmatchcase(lies, name) for name in named):
            return where_they_lie.get(lies, _NAMED)
        if exclude.match_file(name):
            return "exclude"
        if any(each == relative or each.startswith(f"{relative}/") for each in wanted):
            return None
        for where, file, spec in specs:
            if spec.match_file(name[len(where) :]):
                return f"{where}{file}"
        return None

    def walk(
        directory: Path, above: Sequence[tuple[str, str, GitIgnoreSpec]], taken: bool, within: frozenset[Path]
    ) -> Iterator[Path]:
        within |= {directory.resolve()}
        where = "" if directory == base else f"{directory.relative_to(base).as_posix()}/"
        specs = [*above, *_specs(directory, where)]
        for path in sorted(directory.iterdir()):
            relative = path.relative_to(base).as_posix()
            mine = taken or relative in wanted
            reason = reason_for(path, relative, () if mine else specs)
            if reason is not None:
                if reason:
                    left_out.setdefault(reason, []).append(relative)
            elif path.is_dir() and path.resolve() in within:
                left_out.setdefault("Shoal: a link to a folder that it lies in", []).append(relative)
            elif path.is_dir():
                yield from walk(path, specs, mine, within)
            elif path.is_file():  # not a pipe
                yield path

    for path in walk(base, (), False, frozenset()):
        files.append(path.relative_to(base).as_posix())
        size += path.stat().st_size
    return Package(base, tuple(files), size, left_out)


def _show(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 10 * 2**20 else f"{size_bytes / 2**10:,.0f} KiB"


def _specs(directory: Path, where: str) -> Iterator[tuple[str, str, GitIgnoreSpec]]:
    for name in IGNORE_FILES:
        file = directory / name
        if file.is_file():
            lines = file.read_text(errors="replace").splitlines()
            yield where, name, GitIgnoreSpec.from_lines(lines)


def _named(config: TrainJobConfig) -> list[str]:
    """Local paths, and patterns of such, that the config names, and that are read where they lie."""
    if config.task == "script":
        return []
    data = config.data
    names = (data.source, data.held_out_source, data.tokenizer, config.model.directory)
    local = [unquote(name[7:]) if name.startswith("file:///") else name for name in names if name is not None]
    return [_resolved(name) for name in local if name.startswith("/")]


def _resolved(name: str) -> str:
    """A path or pattern without links, as far as it has no wildcard."""
    parts = Path(name).parts
    fixed = next((index for index, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return str(Path(*parts[:fixed]).resolve().joinpath(*parts[fixed:]))


def _wanted(config: TrainJobConfig, base: Path) -> set[str]:
    """What a job needs beyond doubt: its program, and what a script's arguments name."""
    where = PurePosixPath(config.cwd or "")
    if config.is_custom:
        return _module(config.task.partition(":")[0], base, where)
    if config.task != "script":
        return set()
    found = _module(config.module, base, where) if config.module is not None else set()
    words = [PurePosixPath(config.script or "")]
    words += [where / part for each in config.arguments for part in (each, each.partition("=")[2]) if part]
    for word in words:
        path = PurePosixPath(os.path.normpath(word))
        if path.is_absolute() or path.parts[:1] in ((), ("..",)) or str(path) == ".":
            continue
        if (base / path).exists():
            found.add(str(path))
    return found


def _module(module: str, base: Path, where: PurePosixPath) -> set[str]:
    """The file of a module that lies in a folder, and those of the packages that it is in."""
    found, path = set(), where
    for part in module.split("."):
        path /= part
        found |= {str(path / name) for name in ("__init__.py", "__main__.py")} | {f"{path}.py"}
    return {each for each in found if (base / each).is_file()}
