"""What the API server does with an object of a custom resource: its schema, unknown fields refused, and the
rules in it.

`ray.io_rayclusters.yaml.gz` is KubeRay's own, of 1.7 (ray-project/kuberay,
helm-chart/kuberay-operator/crds, commit feeaf72, Apache-2.0).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cel
import jsonschema
import yaml

_FILE = Path(__file__).with_name("ray.io_rayclusters.yaml.gz")
Schema = dict[str, Any]


@cache
def ray_cluster_schema() -> Schema:
    """That of a RayCluster of `ray.io/v1`, as the API server takes it."""
    definition = yaml.load(gzip.decompress(_FILE.read_bytes()), yaml.CSafeLoader)
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # its own schema is every object's
    return schema


def _strict(schema: Any) -> Any:
    """As JSON Schema, with unknown fields refused."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may have the name of a keyword: only what is a schema is changed.
    made = {
        key: {name: _strict(each) for name, each in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
        if key != "description"
    }
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.pop("nullable", False) and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


@cache
def _validator() -> Any:
    return jsonschema.Draft7Validator(ray_cluster_schema())


def refusals(new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[str]:
    """Why the API server would not take an object.

    Args:
        old: the one that is there; None where it is made.
    """
    found = [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(new)]
    for path, rule, value, before in _rules(ray_cluster_schema(), new, old, "$"):
        variables = {"self": value}
        if "oldSelf" in rule["rule"]:
            if before is None:
                continue  # a rule about a change, where there is none
            variables["oldSelf"] = before
        if cel.evaluate(rule["rule"], variables) is not True:
            found.append(f"{path}: {rule.get('message', rule['rule'])}")
    return found


def _rules(schema: Schema, value: Any, old: Any, path: str) -> Iterator[tuple[str, Schema, Any, Any]]:
    """Every rule that holds for something in a value: (where, rule, that, what was there before)."""
    if value is None:
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path, rule, value, old
    if isinstance(value, Mapping):
        before = old if isinstance(old, Mapping) else {}
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name)
            if inner is None and isinstance(schema.get("additionalProperties"), dict):
                inner = schema["additionalProperties"]
            if isinstance(inner, dict):
                yield from _rules(inner, each, before.get(name), f"{path}.{name}")
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for place, each in enumerate(value):
            yield from _rules(schema["items"], each, None, f"{path}[{place}]")
