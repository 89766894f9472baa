"""What `serve_apps.NAME.model` may name: versions and aliases of the registry, where that can be seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.files.storage import Storage
from cluster.models.registry import Registry
from tests.cluster.config.config_files import load, mistakes, position

STORE = "cluster: {storage: ./store}\n"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """`lm` in the storage of STORE: version 1 with 6 attention heads, version 2 with 4."""
    registry = Registry(Storage(tmp_path / "store"))
    for heads in (6, 4):
        model = tmp_path / f"heads-{heads}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
        registry.publish("lm", model, {})
    return registry


def app(model: str, more: str = "") -> str:
    return f"serve_apps: {{a: {{model: {model}{more}}}}}\n"


@pytest.mark.parametrize("model", ["lm", "lm@latest", "lm@1", "lm@production", "lm@3a"])
def test_a_model_of_a_job_of_the_file_may_have_any_version_or_alias(tmp_path: Path, model: str) -> None:
    """They may come with the job: `shoal promote` is for afterwards."""
    load(tmp_path, f"{STORE}train_jobs: {{j: {{publish: lm}}}}\n{app(model)}")


@pytest.mark.parametrize("model", ["lm@Production", "lm@-x", "lm@a@b", "lm@a/b"])
def test_what_can_be_no_alias_is_told_the_forms_there_are(tmp_path: Path, model: str) -> None:
    (found,) = mistakes(tmp_path, f"train_jobs: {{j: {{publish: lm}}}}\n{app(model)}")
    assert found.message == (
        "should be NAME@VERSION, NAME@latest or NAME@ALIAS of the registry, or a directory (./… or /…),"
        f" was `{model}`"
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "lm@staging",
            "there is no lm@staging: lm has the versions 1, 2 and the aliases latest, production",
        ),
        (
            "lm@produktion",
            "there is no lm@produktion (did you mean lm@production?): lm has the versions 1, 2"
            " and the aliases latest, production",
        ),
        ("lm@7", "there is no lm@7: lm has the versions 1, 2 and the aliases latest, production"),
    ],
)
def test_an_alias_or_version_that_is_not_in_a_local_storage_is_a_mistake(
    tmp_path: Path, registry: Registry, model: str, message: str
) -> None:
    registry.promote("lm@1", "production")
    text = STORE + app(model)
    (found,) = mistakes(tmp_path, text)
    assert ((found.line, found.column), found.path) == (position(text, model), "serve_apps.a.model")
    assert found.message == message
    load(tmp_path, STORE + "train_jobs: {j: {publish: lm}}\n" + app(model))


def test_an_alias_whose_version_is_gone_or_that_is_damaged_is_a_mistake(
    tmp_path: Path, registry: Registry
) -> None:
    registry.promote("lm@1", "production")
    Storage(tmp_path / "store").delete_dir("models/lm/1")
    (found,) = mistakes(tmp_path, STORE + app("lm@production"))
    assert found.message.startswith("lm@production names version 1, which is not there any more")
    (tmp_path / "store" / "models" / "lm" / ".aliases" / "production.json").write_text("{")
    (found,) = mistakes(tmp_path, STORE + app("lm@production"))
    assert "production.json is damaged" in found.message
    load(tmp_path, STORE + app("lm@latest"))


def test_an_app_is_held_against_the_version_that_it_names(tmp_path: Path, registry: Registry) -> None:
    registry.promote("lm@1", "production")
    tensor = ", tensor: 3, cpus: 0"
    for model in ("lm@production", "lm@1"):
        load(tmp_path, STORE + app(model, tensor))
    for model in ("lm", "lm@latest", "lm@2"):
        (found,) = mistakes(tmp_path, STORE + app(model, tensor))
        assert found.message.startswith(
            f"should divide the 4 attention heads of `{tmp_path}/store/models/lm/2`"
        )
    registry.promote("lm@2", "production")
    (found,) = mistakes(tmp_path, STORE + app("lm@production", tensor))
    assert "the 4 attention heads" in found.message


def test_aliases_in_a_storage_elsewhere_are_not_looked_for(tmp_path: Path) -> None:
    load(tmp_path, "cluster: {storage: 's3://bucket/x'}\n" + app("lm@production"))


def test_a_file_whose_storage_is_wrong_is_told_only_that(tmp_path: Path, registry: Registry) -> None:
    (found,) = mistakes(tmp_path, "cluster: {storage: 3}\n" + app("lm@nothing"))
    assert found.path == "cluster.storage"
