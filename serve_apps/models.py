"""Which model an app serves: from what the config names to a directory, and onwards as versions come."""

from __future__ import annotations

import os

from cluster.config.models.model_sizes import is_directory
from cluster.config.sections.serve import ServeAppConfig
from cluster.errors import RequestError
from serve_apps.spec import AppSpec


def find_model(name: str, app: ServeAppConfig, storage: str) -> AppSpec:
    """An app with the version of its model that the config names now.

    Raises:
        RequestError: there is no such model.
    """
    from cluster.files.storage import Storage
    from cluster.models.registry import Registry

    if is_directory(app.model):
        if not os.path.isfile(os.path.join(app.model, "config.json")):
            raise RequestError(
                f"serve_apps.{name}.model: {app.model} is no Hugging Face model directory"
                " (it has no config.json)"
            )
        path = os.path.abspath(app.model)
        return AppSpec(name, app, model_path=path, model_version=os.path.basename(path))
    place = Storage(storage)
    version = Registry(place).resolve(app.model)
    local = place.local_path() is not None
    return AppSpec(
        name,
        app,
        model_path=version.path if local else "",
        model_version=version.reference,
        storage=None if local else storage,
    )


def follows(model: str) -> bool:
    """Whether an app's `model` may come to name another version: `NAME@latest`, `NAME@ALIAS` or `NAME`."""
    return not is_directory(model) and not model.partition("@")[2].isdigit()


def model_directory(spec: AppSpec) -> str:
    """A local directory with an app's model, fetched where it lies elsewhere."""
    if spec.storage is None:
        return spec.model_path
    from cluster.files.storage import Storage
    from cluster.models.registry import Registry

    registry = Registry(Storage(spec.storage))
    return str(registry.fetch(registry.resolve(spec.model_version)))
