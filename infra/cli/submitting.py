"""How a job goes from here to its cluster: what travels with it first, and then what it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from cluster.errors import ConfigError, RequestError
from infra.api.client import ApiClient, BadPackageError
from infra.cli.common import say

if TYPE_CHECKING:
    from cluster.config.loader import LoadedConfig
    from cluster.config.sections.train import TrainJobConfig
    from infra.cli.target import Target

Travelling = dict[str, Any]
"""`package` (a digest) and `environment`, as the control API takes them with a job."""


def submit(target: Target, name: str, config: TrainJobConfig, loaded: LoadedConfig) -> dict[str, Any]:
    """Start a job; {"job", "submission_id", …}.

    Raises:
        RequestError: what travels is too large, or a variable that should be passed on is not set.
        ConfigError: it does not fit the cluster.
    """
    document = {"name": name, "config": config.model_dump(mode="json", by_alias=True)}

    def post(travelling: Travelling) -> dict[str, Any]:
        with placed(target, loaded, "train_jobs", name):
            return cast("dict[str, Any]", target.api.post("/jobs", {**document, **travelling}))

    return send_with(target.api, config, loaded, post)


@contextmanager
def placed(target: Target, loaded: LoadedConfig, table: str, name: str) -> Iterator[None]:
    """Let what a cluster says of a job or an app of a config be said at its place in the file."""
    try:
        yield
    except ConfigError as error:
        mistakes = [loaded.placed(mistake, table, name) for mistake in error.mistakes]
        if not target.is_here:
            seen = f" (seen from the head of cluster {target.name})"
            mistakes = [replace(mistake, message=mistake.message + seen) for mistake in mistakes]
        raise ConfigError(mistakes) from None


def send_with(
    api: ApiClient,
    config: TrainJobConfig,
    loaded: LoadedConfig,
    send: Callable[[Travelling], dict[str, Any]],
) -> dict[str, Any]:
    """Send what travels with a job, and then the job; says what of its folder travels.

    Raises:
        RequestError: see `submit`.
    """
    from cluster.config.checks.ground import local_path
    from train_jobs.driver.package import package_of
    from train_jobs.driver.packing import pack
    from train_jobs.spec import env_of

    storage = local_path(loaded.resolved.cluster.storage)
    package = package_of(config, config.folder(loaded.base), [] if storage is None else [storage])
    if config.task != "script":  # its files go into the storage, and may be many
        package.check()
    values = env_of(config, os.environ)
    passed_on = {name: values[name] for name, value in config.env.items() if value is None}
    if not package.files:
        answer = send({"package": None, "environment": passed_on})
    else:
        with tempfile.TemporaryFile() as file:
            digest = pack(package, file)
            size = os.fstat(file.fileno()).st_size

            def post() -> None:
                file.seek(0)
                api.send(f"/packages/{digest}", file, size)

            post()
            try:
                answer = send({"package": digest, "environment": passed_on})
            except BadPackageError:  # the service has started anew in between
                post()
                try:
                    answer = send({"package": digest, "environment": passed_on})
                except BadPackageError as error:
                    raise RequestError(str(error)) from error
    for sentence in package.sentences():
        say(sentence)
    return answer
