"""How a job goes from here to its cluster: what travels with it first, and then what it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.errors import RequestError
from infra.api.client import ApiClient, BadPackageError
from infra.cli.common import say

if TYPE_CHECKING:
    from cluster.config.loader import LoadedConfig
    from cluster.config.sections.train import TrainJobConfig

Travelling = dict[str, Any]
"""`package` (a digest) and `environment`, as the control API takes them with a job."""


def submit(api: ApiClient, name: str, config: TrainJobConfig, loaded: LoadedConfig) -> dict[str, Any]:
    """Start a job; {"job", "submission_id", …}.

    Raises:
        RequestError: what travels is too large, or a variable that should be passed on is not set.
        ConfigError: it does not fit the cluster.
    """
    document = {"name": name, "config": config.model_dump(mode="json", by_alias=True)}
    return send_with(api, config, loaded, lambda traveller: api.post("/jobs", {**document, **traveller}))


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
    from infra.api.packages import pack
    from train_jobs.driver.package import package_of
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
