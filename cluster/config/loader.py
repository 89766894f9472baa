"""Finds the config file, reads it, and says every mistake in it at once."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cluster.config.checks.config_checks import find_mistakes
from cluster.config.find import FILE_NAME, read_config, whole_file
from cluster.config.models.model_sizes import is_directory
from cluster.config.reading import schema
from cluster.config.reading.api_keys import ENVIRONMENT
from cluster.config.reading.deepspeed_settings import read_deepspeed
from cluster.config.reading.overrides import SETTING_FILE, apply_overrides, no_such_entry
from cluster.config.reading.positions import Item, KeyPath, Position, YamlDocument
from cluster.config.reading.sentences import intended, mistake_at, translate
from cluster.config.reading.yaml_reader import read_yaml
from cluster.config.sections.cluster import ApiConfig, ClusterConfig, GatewayConfig, NodeConfig
from cluster.config.sections.root import ShoalConfig
from cluster.config.sections.serve import ServeAppConfig
from cluster.config.sections.train import BUILT_IN_SOURCES, TrainJobConfig
from cluster.errors import ConfigError, Mistake

TlsServer = TypeVar("TlsServer", ApiConfig, GatewayConfig)

RUN_FILE = "config.yaml"
"""In a run's directory, with the job as it was resolved."""
AskNodes = Callable[[ClusterConfig], tuple[NodeConfig, ...] | None]
"""Says which nodes a cluster has now; None where nobody knows."""
_TABLES = ("train_jobs", "serve_apps")

_NOWHERE = Position(FILE_NAME)
"""Of what was sent without its file; whoever has that knows the lines."""
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class LoadedConfig:
    """A config without mistakes, and the file it came from (absolute)."""

    config: ShoalConfig
    path: Path
    document: YamlDocument | None = field(default=None, compare=False, repr=False)
    """What stands in it."""

    def placed(self, mistake: Mistake, table: str, name: str) -> Mistake:
        """A mistake in a job or app of this file that was found where the file is not, at its place in it.

        Args:
            table: train_jobs or serve_apps.
        """
        own = f"{table}.{name}"
        if self.document is None or not mistake.path.startswith(own):
            return mistake
        rest = mistake.path.removeprefix(own).removeprefix(".")
        steps = [int(step) if step.isdecimal() else step for step in rest.split(".")] if rest else []
        place = self.document.value_place((table, name, *steps))
        if place.setting is not None:
            return replace(mistake, file=SETTING_FILE)
        return replace(mistake, file=place.file, line=place.line, column=place.column)

    @property
    def base(self) -> Path:
        """The directory that relative paths of the config start from."""
        return self.path.parent

    @property
    def resolved(self) -> ShoalConfig:
        """The config with its paths made absolute."""
        return resolve_paths(self.config, self.base)


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    scope: str | None = None,
    *,
    across: bool = True,
    others: bool = True,
    ask_nodes: AskNodes | None = None,
) -> LoadedConfig:
    """Read and check the config file with the `--set` overrides laid over it.

    `scope` (`train_jobs.NAME`, `serve_apps.NAME`) is where the keys of overrides start that do not start
    with a section of the file. `across=False` leaves out what is checked across sections and against this
    machine's files: whether jobs and apps fit the nodes, whether paths and models are there. `others=False`
    leaves out what is wrong with other jobs and apps than that of `scope`, which are nobody's business then.
    `ask_nodes` says which nodes a cluster has that somebody else starts; without it jobs and apps are checked
    against those of the file, if it names any.

    Raises:
        ConfigError: with every mistake, in the order of the file, those of `overrides` last.
    """
    file = str(path)
    document = _read(path, file)
    scope_path: KeyPath = ()
    if scope is not None:
        scope_path = _scope(document, scope)
    document = apply_overrides(document, overrides, scope_path)
    absolute = Path(os.path.abspath(path))
    config, mistakes, _ = _validate(document, absolute.parent, across, ask_nodes=ask_nodes)
    if not others and scope is not None:
        entries = {f"{table}.{name}" for table in _TABLES for name in getattr(config, table)}
        mistakes = [each for each in mistakes if _entry_of(each.path, entries) in (None, scope)]
    if mistakes:
        raise ConfigError(sorted(mistakes, key=_file_order))
    return LoadedConfig(config, absolute, document)


def _entry_of(path: str, entries: Iterable[str]) -> str | None:
    """The job or app that a path leads into; names may hold dots."""
    there = [each for each in entries if path == each or path.startswith(f"{each}.")]
    return max(there, key=len, default=None)


def change_job(text: str, name: str, overrides: Sequence[str], around: LoadedConfig) -> TrainJobConfig:
    """A job out of its run's own config file, with overrides laid over it, for the cluster of another file.

    What was wrong with it before is not said: a run may have outlived the data it has read. The paths of
    overrides start where those of the other file do.

    Raises:
        ConfigError: with every mistake that the overrides make.
    """
    document = read_yaml(text, Position(RUN_FILE))
    changed = apply_overrides(document, overrides, _scope(document, f"train_jobs.{name}"))
    cluster = around.config.cluster
    _, before, _ = _validate(document, around.base, True, cluster)
    config, after, sound = _validate(changed, around.base, True, cluster)
    known = {(mistake.path, repr(mistake.given)) for mistake in before}
    new = [mistake for mistake in after if (mistake.path, repr(mistake.given)) not in known]
    if new or not sound:
        raise ConfigError(sorted(new or after, key=_file_order))
    return resolve_paths(config, around.base).train_jobs[name]


def mistakes_of_job(
    name: str, job: TrainJobConfig, cluster: ClusterConfig, folder: Path, kinds: tuple[NodeConfig, ...]
) -> list[Mistake]:
    """What is wrong with a job that was sent here without its file, seen from this machine.

    Args:
        job: with its paths absolute.
        folder: what has come with it.
        kinds: the nodes that there are.
    """
    sent = job.model_copy(update={"working_dir": None})
    whole = ShoalConfig(cluster=cluster, train_jobs={name: sent})
    document = YamlDocument(FILE_NAME, Item(_NOWHERE, {}))
    own = f"train_jobs.{name}"
    return [
        each for each in find_mistakes(whole, document, folder, (), kinds) if _entry_of(each.path, (own,))
    ]


def mistakes_of_app(
    name: str, app: ServeAppConfig, cluster: ClusterConfig, kinds: tuple[NodeConfig, ...]
) -> list[Mistake]:
    """The same of an app."""
    whole = ShoalConfig(cluster=cluster, serve_apps={name: app})
    document = YamlDocument(FILE_NAME, Item(_NOWHERE, {}))
    own = f"serve_apps.{name}"
    return [
        each for each in find_mistakes(whole, document, Path("/"), (), kinds) if _entry_of(each.path, (own,))
    ]


def resolve_paths(config: ShoalConfig, base: Path) -> ShoalConfig:
    """The config with its relative paths made absolute from `base`; URIs with a scheme stay as they are."""
    jobs = {name: _resolve_job(job, base) for name, job in config.train_jobs.items()}
    apps = {
        name: app.model_copy(update={"model": _absolute(app.model, base)}) if is_directory(app.model) else app
        for name, app in config.serve_apps.items()
    }
    return config.model_copy(
        update={"cluster": _resolve_cluster(config.cluster, base), "train_jobs": jobs, "serve_apps": apps}
    )


def _resolve_cluster(cluster: ClusterConfig, base: Path) -> ClusterConfig:
    identity = cluster.ssh.identity_file
    if identity is not None:
        identity = _absolute(os.path.expanduser(identity), base)
        ssh = cluster.ssh.model_copy(update={"identity_file": identity})
        cluster = cluster.model_copy(update={"ssh": ssh})
    if not cluster.seen_here:
        return cluster  # all else is on the nodes
    gateway = cluster.gateway
    if gateway.keys is not None and not gateway.keys.startswith(ENVIRONMENT):
        gateway = gateway.model_copy(update={"keys": _absolute(gateway.keys, base)})
    storage = _absolute(cluster.storage, base)
    return cluster.model_copy(
        update={
            "storage": storage,
            "gateway": _with_absolute_certificate(gateway, base),
            "api": _with_absolute_certificate(cluster.api, base),
        }
    )


def _with_absolute_certificate(server: TlsServer, base: Path) -> TlsServer:
    files = {"certificate": server.certificate, "private_key": server.private_key}
    return server.model_copy(
        update={key: _absolute(file, base) for key, file in files.items() if file is not None}
    )


def _resolve_job(job: TrainJobConfig, base: Path) -> TrainJobConfig:
    data: dict[str, Any] = {}
    if job.data.source is not None and job.data.source not in BUILT_IN_SOURCES.values():
        data["source"] = _absolute(job.data.source, base)
    if job.data.held_out_source is not None:
        data["held_out_source"] = _absolute(job.data.held_out_source, base)
    if job.data.tokenizer is not None:
        data["tokenizer"] = _absolute(job.data.tokenizer, base)
    update: dict[str, Any] = {"data": job.data.model_copy(update=data)}
    if job.working_dir is not None:
        update["working_dir"] = _absolute(job.working_dir, base)
    if job.model.directory is not None:
        update["model"] = job.model.model_copy(update={"directory": _absolute(job.model.directory, base)})
    if isinstance(job.parallel.deepspeed, str):
        update["parallel"] = job.parallel.model_copy(
            update={"deepspeed": _deepspeed(_absolute(job.parallel.deepspeed, base))}
        )
    for name in ("script", "cwd"):  # they travel with the working directory
        if (path := getattr(job, name)) is not None:
            update[name] = os.path.normpath(path)
    return job.model_copy(update=update)


def _deepspeed(path: str) -> str | dict[str, Any]:
    """What the file says, which the job takes along; the path where it cannot be read: the checks say why."""
    try:
        return read_deepspeed(path)
    except ValueError:
        return path


def _absolute(path: str, base: Path) -> str:
    if _SCHEME.match(path):
        return path
    return os.path.abspath(os.path.join(os.path.abspath(base), os.path.expanduser(path)))


def _read(path: Path, file: str) -> YamlDocument:
    """The file as a tree with positions; its top is a section.

    Raises:
        ConfigError: it cannot be read, or it is not one YAML document with sections.
    """
    text = read_config(path, file)
    document = read_yaml(text, Position(file))
    top = document.root.value
    if top is None:
        raise whole_file(file, "is empty; `shoal init` writes a file that works as it is")
    if not isinstance(top, Mapping):
        kind = "a list" if isinstance(top, tuple) else "one value"
        place = document.root.place
        message = f"holds {kind} at its top; it should hold the sections {', '.join(schema.keys_at(()))}"
        raise ConfigError([*document.mistakes, Mistake(file, place.line, place.column, "", None, message)])
    return document


def _scope(document: YamlDocument, scope: str) -> KeyPath:
    """The path of the job or app that `scope` names.

    Raises:
        ConfigError: the file has no such job or app.
    """
    table, _, name = scope.partition(".")
    if not schema.is_named_table((table,)) or not name:
        raise ValueError(f"a scope is train_jobs.NAME or serve_apps.NAME, not {scope!r}")
    _, item, there = document.find((table, name))
    if there:
        return (table, name)
    place, item, _ = document.find((table,))
    names = list(item.value) if isinstance(item.value, Mapping) and document.find((table,))[2] else []
    message = no_such_entry((table,), name, names)
    raise ConfigError([mistake_at(place, (table, name), name, message)])


def _validate(
    document: YamlDocument,
    base: Path,
    across: bool,
    cluster: ClusterConfig | None = None,
    ask_nodes: AskNodes | None = None,
) -> tuple[ShoalConfig, list[Mistake], bool]:
    """The config, with defaults where values are wrong in themselves; every mistake; whether none is.

    Args:
        cluster: what is checked against instead of the document's own.
    """
    mistakes = list(document.mistakes)
    noted = {(mistake.file, mistake.line, mistake.column) for mistake in mistakes if mistake.line is not None}
    broken: set[KeyPath] = set()
    data = document.root.plain()
    try:
        sound = ShoalConfig.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        for path, mistake in translate(error, document):
            if (mistake.file, mistake.line, mistake.column) not in noted:
                mistakes.append(mistake)
            broken.add(path)
            meant = intended(path)
            if meant is not None:
                broken.add(meant)
        sound = _sound_part(data)
    checked = sound if cluster is None else sound.model_copy(update={"cluster": cluster})
    if across:
        asked = ask_nodes is not None and checked.cluster.provider != "embedded"
        kinds = ask_nodes(checked.cluster) if asked and ask_nodes is not None else None
        mistakes += find_mistakes(resolve_paths(checked, base), document, base, broken, kinds)
    return sound, mistakes, not broken


def _sound_part(data: dict[str, Any]) -> ShoalConfig:
    """The config with defaults where values are wrong, so that what can be checked beyond them is checked."""
    while True:
        try:
            return ShoalConfig.model_validate(data, by_alias=True, by_name=False)
        except ValidationError as error:
            wrong = [_replaceable(entry) for entry in error.errors(include_url=False, include_input=False)]
        data = _without(data, wrong)


def _replaceable(entry: ErrorDetails) -> list[str]:
    """The keys to what must be left out for an error: a list goes whole, and so does what misses a key."""
    loc = entry["loc"][:-1] if entry["loc"][-1] == "[key]" else entry["loc"]
    keys = list(itertools.takewhile(lambda step: isinstance(step, str), loc))
    whole = entry["type"] == "missing" and len(keys) == len(loc)
    return [str(key) for key in (keys[:-1] if whole else keys)]


def _without(data: dict[str, Any], wrong: Iterable[Sequence[str]]) -> dict[str, Any]:
    """The data without what the keys of `wrong` lead to."""
    deeper: dict[str, list[Sequence[str]]] = {}
    gone: set[str] = set()
    for first, *rest in wrong:
        if rest and isinstance(data.get(first), dict):
            deeper.setdefault(first, []).append(rest)
        else:
            gone.add(first)
    return {
        key: _without(value, deeper[key]) if key in deeper else value
        for key, value in data.items()
        if key not in gone
    }


def _file_order(mistake: Mistake) -> tuple[bool, int, int]:
    return (mistake.file == SETTING_FILE, mistake.line or 0, mistake.column or 0)
