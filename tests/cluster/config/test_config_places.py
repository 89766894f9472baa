"""Mistakes in values and keys: all at once, in file order, each with its exact place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes, places, position

MANY = """\
# a comment
cluster:
  nodes:
    - {name: head, cpus: 0}
    - {name: worker, count: 2, cpus: two}
  storag: ./x
train_jobs:
  first:
    parallel:
      stragety: fsdp
    batch: {global: 0, micro: 8}
    steps:
    optimizer: {learning_rate: .nan}
    precision: fp23
  Second: {}
serve_apps:
  chat: {engine: vlm}
  late: 5
  3: {}
"""


def test_every_mistake_is_listed_once_in_file_order_at_its_place(tmp_path: Path) -> None:
    found = mistakes(tmp_path, MANY)
    assert places(found) == [
        (*position(MANY, "two"), "cluster.nodes.1.cpus"),
        (*position(MANY, "storag:"), "cluster.storag"),
        (*position(MANY, "stragety"), "train_jobs.first.parallel.stragety"),
        (*position(MANY, "0, micro"), "train_jobs.first.batch.global"),
        (*position(MANY, "steps:"), "train_jobs.first.steps"),
        (*position(MANY, ".nan"), "train_jobs.first.optimizer.learning_rate"),
        (*position(MANY, "fp23"), "train_jobs.first.precision"),
        (*position(MANY, "Second"), "train_jobs.Second"),
        (*position(MANY, "chat:"), "serve_apps.chat.model"),
        (*position(MANY, "vlm"), "serve_apps.chat.engine"),
        (*position(MANY, "5\n"), "serve_apps.late"),
        (*position(MANY, "3:"), "serve_apps"),
    ]
    assert {mistake.file for mistake in found} == {str(tmp_path / "shoal.yaml")}
    json.dumps([mistake.as_json() for mistake in found], allow_nan=False)


def message(directory: Path, text: str) -> str:
    (found,) = mistakes(directory, text)
    return found.message


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("steps: 0", "should be a whole number of at least 1, was 0"),
        ("steps: 1.5", "should be a whole number of at least 1, was 1.5"),
        ('steps: "10"', 'should be a whole number of at least 1, was "10"'),
        ("steps: true", "should be a whole number of at least 1, was true"),
        ("steps: []", "should be a whole number of at least 1, was an empty list"),
        ("steps:", "should be a whole number of at least 1, was nothing; leave the key out for its default"),
        ("steps: .inf", "should be a whole number of at least 1, was inf"),
        ("optimizer: {beta1: 1}", "should be a number of at least 0 and below 1, was 1"),
        ("optimizer: {max_grad_norm: 0}", "should be a number above 0, or null, was 0"),
        ("optimizer: {weight_decay: -.inf}", "should be a number of at least 0, was -inf"),
        ("optimizer: {weight_decay: 1e999}", "should be a number of at least 0, was inf"),
        (
            "optimizer: {name: adamv}",
            'should be one of `adamw`, `sgd`, `adafactor`, was "adamv"; did you mean `adamw`?',
        ),
        ("checkpoint: {asynchronous: 1}", "should be true or false, was 1"),
        ("data: {source: ''}", 'should be text, not empty, or null, was ""'),
        ("data: {text_column: 5}", "should be text, not empty, was 5"),
        ("evaluate: [50]", "should be a section with the key `every_steps`, was a list of 1"),
        ("publish: Bad Name", None),
    ],
)
def test_a_wrong_value_is_told_what_is_allowed_and_what_it_was(
    value: str, sentence: str | None, tmp_path: Path
) -> None:
    told = message(tmp_path, f"train_jobs:\n  a:\n    {value}\n")
    if sentence is None:
        assert told.startswith("should be a name of lower-case letters")
        assert told.endswith('was "Bad Name"')
    else:
        assert told == sentence


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("train_jobs: {a: {parallel: {stragety: fsdp}}}", "did you mean `strategy`?"),
        ("train_jobs: {a: {learning_rate: 1.0}}", "did you mean `optimizer.learning_rate`?"),
        ("train_jobs: {a: {warmup-steps: 1}}", "did you mean `optimizer.warmup_steps`?"),
        ("train_jobs: {a: {batch: {global_size: 1}}}", "did you mean `global`?"),
        ("train_job: {a: {}}", "did you mean `train_jobs`?"),
        ("cluster: {nodes: [{name: a, cpu: 1}]}", "did you mean `cpus`?"),
        ("serve_apps: {a: {model: ./m, replica: 1}}", "did you mean `replicas`?"),
    ],
)
def test_an_unknown_key_is_told_the_nearest_right_name(text: str, hint: str, tmp_path: Path) -> None:
    found = mistakes(tmp_path, text + "\n")
    assert any(hint in mistake.message and "known here: " in mistake.message for mistake in found)


def test_an_unknown_key_like_no_other_is_given_no_false_hint(tmp_path: Path) -> None:
    told = message(tmp_path, "cluster: {zzz: 1}\n")
    assert "did you mean" not in told
    assert "known here: name, provider, address, nodes, storage" in told


def test_the_list_of_nodes_cannot_be_empty_or_endless(tmp_path: Path) -> None:
    for text, was in (("[]", "an empty list"), ("[" + "{name: a}, " * 1001 + "]", "a list of 1001")):
        told = message(tmp_path, f"cluster: {{nodes: {text}}}\n")
        assert told == f"should be a list of 1 to 1000 entries, was {was}"


def test_what_was_given_goes_into_the_result(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "cluster: {name: 5, storag: x}\ntrain_jobs: {a: {optimizer: {beta1: .nan}}}\n")
    assert [mistake.given for mistake in found] == [5, "storag", "nan"]


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        (
            "serve_apps:\n  chat: {model: ./m}\n  chat: {model: ./m}\n",
            (3, 3, "serve_apps.chat"),
            "two apps are called `chat`; the first is on line 2",
        ),
        (
            "train_jobs:\n  a: {}\n  a: {}\n",
            (3, 3, "train_jobs.a"),
            "two jobs are called `a`; the first is on line 2",
        ),
        (
            "cluster:\n  name: a\n  name: b\n",
            (3, 3, "cluster.name"),
            "the key `name` is given twice; it was first given on line 2",
        ),
    ],
)
def test_keys_given_twice_are_named_as_what_they_are(
    text: str, place: tuple[int, int, str], sentence: str, tmp_path: Path
) -> None:
    found = [mistake for mistake in mistakes(tmp_path, text) if "does not exist" not in mistake.message]
    assert places(found) == [place]
    assert found[0].message == sentence


@pytest.mark.parametrize("key", ["1", "true", "~", "1.5", "[a, b]", "{a: b}"])
def test_keys_that_are_no_text_are_mistakes(key: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"train_jobs:\n  ? {key}\n  : {{}}\n")
    assert (found.line, found.path) == (2, "train_jobs")
    assert found.message.startswith("a key should be text, was ")


def test_numbers_with_thousands_of_digits_are_no_numbers(tmp_path: Path) -> None:
    for number in ("9" * 5000, "0x" + "f" * 5000):
        told = message(tmp_path, f"train_jobs: {{a: {{steps: {number}}}}}\n")
        assert told.startswith("is not a number that can be used")
        assert len(told) < 200


def test_control_characters_and_tags_have_no_place_in_values(tmp_path: Path) -> None:
    assert "U+0000" in message(tmp_path, 'cluster: {storage: "a\\0b"}\n')
    assert "U+D800" in message(tmp_path, 'cluster: {storage: "a\\ud800"}\n')
    assert "YAML tag" in message(tmp_path, "cluster: !!python/object:os.system {}\n")
    assert "YAML tag" in message(tmp_path, "cluster: {name: !secret x}\n")


def test_sections_with_nothing_in_them_mean_their_defaults(tmp_path: Path) -> None:
    empty = "cluster:\n  gateway:\ntrain_jobs:\n  a:\n  b:\n    model:\n    workers:\nserve_apps:\n"
    full = "train_jobs: {a: {}, b: {}}\n"
    assert load(tmp_path, empty).config == load(tmp_path, full).config


def test_anchors_and_merge_keys_work_as_yaml_says(tmp_path: Path) -> None:
    config = load(
        tmp_path, "train_jobs:\n  a: &a {steps: 3, seed: 7}\n  b:\n    <<: *a\n    steps: 4\n  c: *a\n"
    ).config
    assert [(job.steps, job.seed) for job in config.train_jobs.values()] == [(3, 7), (4, 7), (3, 7)]


def test_windows_line_ends_and_byte_order_marks_do_not_shift_places(tmp_path: Path) -> None:
    assert places(mistakes(tmp_path, b"\xef\xbb\xbfcluster:\r\n  nam: x\r\n")) == [(2, 3, "cluster.nam")]


def test_a_file_of_rubbish_is_cut_short_and_says_so(tmp_path: Path) -> None:
    text = "cluster:\n" + "".join(f"  key{index}: 1\n" for index in range(1000))
    found = mistakes(tmp_path, text)
    assert len(found) == 301
    assert found[-1].message == "and 700 more mistakes, not listed"
