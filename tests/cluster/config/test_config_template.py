"""The file that `shoal init` writes, and the schema that editors read it with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from cluster.config.loader import load_config
from cluster.config.reading.schema import allowed, describe, json_schema
from cluster.config.sections.train import RecoveryConfig
from cluster.config.template import CONFIG_FILE, SCHEMA_FILE, TEMPLATE, write_template
from cluster.errors import ConfigError, RequestError

VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_template_has_no_mistake_and_is_what_the_design_promises(tmp_path: Path) -> None:
    written = write_template(tmp_path)
    assert written == [tmp_path / CONFIG_FILE, tmp_path / SCHEMA_FILE]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    config = load_config(tmp_path / CONFIG_FILE).config
    job, app = config.train_jobs["stdlib-lm"], config.serve_apps["chat"]
    assert [(kind.name, kind.count, kind.cpus) for kind in config.cluster.nodes] == [
        ("head", 1, 0),
        ("worker", 2, 2),
    ]
    assert (job.parallel.strategy, job.workers.min, job.workers.max) == ("fsdp", 2, 2)
    assert (job.model.architecture, job.data.source, job.publish) == ("llama", "python-stdlib", "stdlib-lm")
    assert (app.model, app.tensor, app.replicas.min, app.replicas.max) == ("stdlib-lm@latest", 2, 1, 2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup_stable_decay"])
def test_its_job_is_tried_with_fewer_steps_than_its_warm_up_has(schedule: str, tmp_path: Path) -> None:
    write_template(tmp_path)
    changes = ("steps=10", f"optimizer.schedule={schedule}")
    settings = [f"train_jobs.stdlib-lm.{change}" for change in changes]
    job = load_config(tmp_path / CONFIG_FILE, settings).resolved.train_jobs["stdlib-lm"]
    assert job.steps == 10 < job.optimizer.warmup_steps


def test_editors_are_pointed_at_the_schema_beside_it() -> None:
    assert TEMPLATE.splitlines()[0] == f"# yaml-language-server: $schema=./{SCHEMA_FILE}"


def test_every_key_says_what_it_means_or_stands_under_one_that_does() -> None:
    said_enough = {"architecture", "name", "cluster", "train_jobs", "serve_apps", "nodes", "optimizer"}
    for line in TEMPLATE.splitlines():
        key = re.match(r"\s*(?:- \{)?([\w-]+):", line)
        if key is not None and "#" not in line:
            opens_a_section = line.rstrip().endswith(":")
            assert opens_a_section or key[1] in said_enough, line


def test_the_template_is_valid_under_its_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    VALIDATOR.validate(YAML(typ="safe", pure=True).load(TEMPLATE))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("cluster:\ntrain_jobs:\n  a:\n  b:\n    model:\nserve_apps:\n", True),
        ("cluster: {gateway: {port: 1}}", True),
        ("train_jobs: {a: {batch: {global: 8, micro: 4}}}", True),
        ("train_jobs: {a: {optimizer: {max_grad_norm: null}}}", True),
        ("cluser: {}", False),
        ("cluster: {gateway: {port: 0}}", False),
        ("cluster: {nodes: []}", False),
        ("train_jobs: {Bad Name: {}}", False),
        ("train_jobs: {a: {batch: {global_size: 8}}}", False),
        ("train_jobs: {a: {steps: '8'}}", False),
        ("train_jobs: {a: {parallel: {strategy: zero}}}", False),
        ("serve_apps: {a: {}}", False),
        ("serve_apps: {a: }", False),
        ("[]", False),
    ],
)
def test_the_schema_and_the_loader_agree(text: str, valid: bool, tmp_path: Path) -> None:
    data: Any = YAML(typ="safe", pure=True).load(text)
    assert VALIDATOR.is_valid(data) is valid
    path = tmp_path / CONFIG_FILE
    path.write_text(text)
    if valid:
        load_config(path)
    else:
        with pytest.raises(ConfigError):
            load_config(path)


@pytest.mark.parametrize("there", [[CONFIG_FILE], [SCHEMA_FILE], [CONFIG_FILE, SCHEMA_FILE]])
def test_files_that_are_there_are_named_and_nothing_is_changed(there: list[str], tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).write_text("mine")
    with pytest.raises(RequestError, match="already there; --force overwrites") as raised:
        write_template(tmp_path)
    assert all(str(tmp_path / name) in str(raised.value) for name in there)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(there, "mine")

    write_template(tmp_path, force=True)
    assert (tmp_path / CONFIG_FILE).read_text() == TEMPLATE
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG_FILE, SCHEMA_FILE])


def test_directories_are_made_and_what_is_none_is_a_request_error(tmp_path: Path) -> None:
    assert write_template(tmp_path / "a" / "b")[0].read_text() == TEMPLATE
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        write_template(tmp_path / "file" / "x")
    (tmp_path / "c" / CONFIG_FILE).mkdir(parents=True)
    with pytest.raises(RequestError, match="is a directory"):
        write_template(tmp_path / "c", force=True)


def test_the_template_survives_what_the_defaults_survive(tmp_path: Path) -> None:
    recovery = load_config(write_template(tmp_path)[0]).config.train_jobs["stdlib-lm"].recovery
    assert recovery == RecoveryConfig()


@pytest.mark.parametrize(
    "key",
    ["worker_failures", "node_failures", "hangs", "start_failures", "memory_failures", "transient_errors"],
)
def test_every_class_of_failure_has_a_budget_that_the_schema_explains(key: str, tmp_path: Path) -> None:
    path = ("train_jobs", "a", "recovery", key)
    assert allowed(path) == "a whole number of at least 0"
    assert (describe(path) or "").startswith("Times in a row that the job")
    file = tmp_path / CONFIG_FILE
    file.write_text(f"train_jobs: {{a: {{recovery: {{{key}: 7}}}}}}")
    assert getattr(load_config(file).config.train_jobs["a"].recovery, key) == 7
    file.write_text(f"train_jobs: {{a: {{recovery: {{{key}: -1}}}}}}")
    with pytest.raises(ConfigError, match=rf"recovery\.{key}: should be a whole number of at least 0"):
        load_config(file)
