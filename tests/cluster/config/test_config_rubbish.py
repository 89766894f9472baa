"""Whatever stands in the file or in `--set`: a config, or mistakes in sentences, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML, YAMLError

from cluster.config.loader import load_config
from cluster.config.reading import schema
from cluster.config.reading.positions import KeyPath, Position
from cluster.config.reading.yaml_reader import read_yaml
from cluster.config.template import TEMPLATE
from cluster.errors import ConfigError, Mistake

FEW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=200)


def config_or_mistakes(path: Path, overrides: list[str] | None = None) -> None:
    """Load the file; whatever it raises but a ConfigError whose mistakes read well fails the test."""
    found: tuple[Mistake, ...] | None = None
    try:
        load_config(path, overrides or [])
    except ConfigError as error:
        found = error.mistakes
    assert found is None or found
    for mistake in found or ():
        assert "\n" not in str(mistake)
        assert len(str(mistake)) < 1500
        assert (mistake.line is None) == (mistake.column is None)
        json.dumps(mistake.as_json(), allow_nan=False)


def _keys(path: KeyPath = ()) -> list[str]:
    found: list[str] = []
    for key in schema.keys_at(path) or (["a", "b"] if schema.is_named_table(path) else []):
        found.extend([key, *_keys((*path, key))])
    return found


words = st.sampled_from(sorted(set(_keys()) | {"0", "<<", "", "x.y"}))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.sampled_from(["fsdp", "./x", "a@b", "lm", "s3://x", "~", "\0", "\ud800", "é\n"]),
    st.text(max_size=8),
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


def shaped(path: KeyPath = ()) -> st.SearchStrategy[Any]:
    """Values that look like the section at `path`, with rubbish where it is least expected."""
    keys = schema.keys_at(path) or (["a", "b"] if schema.is_named_table(path) else [])
    if not keys:
        return values
    inside = st.fixed_dictionaries({}, optional={key: shaped((*path, key)) for key in keys})
    return st.one_of(inside, inside, inside, values)


@MANY
@given(data=st.binary(max_size=200))
def test_random_bytes(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_bytes(data)
    config_or_mistakes(path)


@MANY
@given(text=st.text(alphabet="ab01:-?[]{},&*!|>'\"%@`#~.<\\ux \t\n", max_size=60))
@example(text='"\\UFFFFFFFF"')
@example(text="%YAML 1.1\n---\n0")
@example(text="&a [&a [*a]]")
@example(text="<<: *a")
@example(text="<<: [1, {<<: 2}]")
@example(text="? |\n a\n: b")
def test_random_yaml_punctuation(text: str, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text(text)
    config_or_mistakes(path)


@FEW
@given(data=shaped())
def test_random_values_in_the_shape_of_a_config(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text(json.dumps(data))  # JSON is YAML, but for NaN and Infinity, which are text here
    config_or_mistakes(path)


@FEW
@given(keys=st.lists(words, min_size=1, max_size=5), value=st.text(max_size=12), scoped=st.booleans())
def test_random_settings(keys: list[str], value: str, scoped: bool, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text(TEMPLATE)
    config_or_mistakes(path, [("train_jobs.stdlib-lm." if scoped else "") + ".".join(keys) + "=" + value])


@FEW
@given(cut=st.integers(0, len(TEMPLATE)), paste=st.text(alphabet="a: {}[]\t\n-&*\"'\x01", max_size=5))
def test_a_good_file_with_something_typed_into_it(cut: int, paste: str, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text(TEMPLATE[:cut] + paste + TEMPLATE[cut:])
    config_or_mistakes(path)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.sampled_from(["a", "1.5e3", "0x1F", "yes", "1_0", "b c"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=10,
)


@MANY
@given(data=plain, flow=st.booleans())
def test_values_equal_what_the_yaml_library_itself_reads(data: Any, flow: bool, tmp_path: Path) -> None:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = flow
    path = tmp_path / "any.yaml"
    with path.open("w") as stream:
        yaml.dump(data, stream)
    text = path.read_text()
    assert (
        read_yaml(text, Position("any.yaml")).root.plain() == YAML(typ="safe", pure=True).load(text) == data
    )


@MANY
@given(text=st.text(alphabet="ab1:-[]{},&*' \n", max_size=30))
def test_whatever_the_yaml_library_refuses_is_refused(text: str) -> None:
    try:
        expected = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, TypeError, ValueError, AttributeError):
        with pytest.raises(ConfigError):
            _read_whole(text)
        return
    try:
        found = _read_whole(text)
    except ConfigError:
        return  # more is refused than YAML does: keys that are no text, aliases of themselves, …
    assert found == expected


def _read_whole(text: str) -> Any:
    document = read_yaml(text, Position("any.yaml"))
    if document.mistakes:
        raise ConfigError(document.mistakes)
    return document.root.plain()
