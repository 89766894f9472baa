"""`--set`: the same values, the same checks, over the file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.config.loader import change_job
from cluster.errors import ConfigError
from tests.cluster.config.config_files import load, mistakes

TEXT = """\
cluster:
  nodes:
    - {name: head, cpus: 0}
    - {name: worker, count: 2, cpus: 2}
train_jobs:
  stdlib-lm: {steps: 200, publish: lm}
  my.job: {steps: 5}
  my: {steps: 6}
serve_apps:
  chat: {model: lm}
"""


def test_values_are_read_as_yaml(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        TEXT,
        [
            "train_jobs.stdlib-lm.steps=10",
            "train_jobs.stdlib-lm.optimizer.learning_rate=1e-4",
            "train_jobs.stdlib-lm.checkpoint.asynchronous=true",
            "train_jobs.stdlib-lm.evaluate.every_steps=null",
            "train_jobs.stdlib-lm.workers={min: 1, max: 2}",
            "cluster.name=other",
        ],
    ).config
    job = config.train_jobs["stdlib-lm"]
    assert job.steps == 10
    assert job.optimizer.learning_rate == 1e-4
    assert job.checkpoint.asynchronous is True
    assert job.evaluate.every_steps is None
    assert (job.workers.min, job.workers.max) == (1, 2)
    assert config.cluster.name == "other"


def test_later_settings_win_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    plain = load(tmp_path, TEXT).config
    config = load(tmp_path, TEXT, ["train_jobs.stdlib-lm.steps=10", "train_jobs.stdlib-lm.steps=11"]).config
    assert config.train_jobs["stdlib-lm"] == plain.train_jobs["stdlib-lm"].model_copy(update={"steps": 11})
    assert config.cluster == plain.cluster


def test_list_elements_go_by_their_index(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT, ["cluster.nodes.1.cpus=4"]).config
    assert [node.cpus for node in config.cluster.nodes] == [0, 4]
    assert config.cluster.nodes[1].count == 2


def test_list_elements_of_a_default_can_be_set(tmp_path: Path) -> None:
    config = load(tmp_path, "cluster:\n", ["cluster.nodes.1.cpus=4"]).config
    assert [(node.name, node.cpus) for node in config.cluster.nodes] == [("head", 0), ("worker", 4)]


@pytest.mark.parametrize(
    "key", ["train_jobs.my.job.steps", 'train_jobs."my.job".steps', "train_jobs.'my.job'.steps"]
)
def test_names_with_dots_are_found(key: str, tmp_path: Path) -> None:
    config = load(tmp_path, TEXT, [f"{key}=9"]).config
    assert {name: job.steps for name, job in config.train_jobs.items()} == {
        "stdlib-lm": 200,
        "my.job": 9,
        "my": 6,
    }


def test_keys_start_from_the_scope_unless_they_start_with_a_section(tmp_path: Path) -> None:
    settings = ["steps=10", "workers.max=2", "cluster.name=other", "train_jobs.my.steps=3"]
    config = load(tmp_path, TEXT, settings, scope="train_jobs.my.job").config
    assert config.train_jobs["my.job"].steps == 10
    assert config.train_jobs["my.job"].workers.max == 2
    assert config.train_jobs["my"].steps == 3
    assert config.cluster.name == "other"


def test_a_scope_that_is_not_in_the_file_is_a_mistake_with_the_nearest_name(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, TEXT, ["steps=10"], scope="train_jobs.stdlib-ml")
    assert (
        found.message
        == "there is no job `stdlib-ml`; did you mean `stdlib-lm`? (the file has: stdlib-lm, my.job, my)"
    )
    assert (found.line, found.path) == (5, "train_jobs.stdlib-ml")
    (found,) = mistakes(tmp_path, "cluster: {}\n", scope="serve_apps.chat")
    assert found.message == "there is no app `chat` (the file has: none)"


def test_a_job_that_is_not_there_is_not_made_by_a_slip(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, TEXT, ["train_jobs.stdlib-ml.steps=1"])
    assert "there is no job `stdlib-ml`; did you mean `stdlib-lm`?" in found.message
    config = load(tmp_path, TEXT, ["train_jobs.new={steps: 3}"]).config
    assert config.train_jobs["new"].steps == 3


@pytest.mark.parametrize(
    ("setting", "path", "words"),
    [
        ("train_jobs.my.steps=0", "train_jobs.my.steps", "should be a whole number of at least 1, was 0"),
        ("train_jobs.my.step=1", "train_jobs.my.step", "did you mean `steps`?"),
        ("steps=1", "steps", "unknown key `steps`"),
        ("train_jobs.my.steps", "", "should be KEY=VALUE"),
        ("=1", "", "should be names joined by dots"),
        ("a..b=1", "", "should be names joined by dots"),
        ("cluster.=1", "", "ends with a dot"),
        ("." * 5000 + "=1", "", "should be names joined by dots"),
        ("a." * 5000 + "a=1", "", "should be names joined by dots"),
        ("cluster.name.x=1", "cluster.name", "is not a section"),
        ("cluster.nodes.5.cpus=1", "cluster.nodes.5", "is a list of 2; name one by its index, 0 to 1"),
        ("cluster.nodes.worker.cpus=1", "cluster.nodes.worker", "is a list of 2"),
        ("cluster.nodes.-1.cpus=1", "cluster.nodes.-1", "is a list of 2"),
        ("cluster.name=[", "cluster.name", "is not YAML"),
        ("cluster.name={a: 1, a: 2}", "cluster.name", "given twice"),
        ("cluster.name=" + "[" * 10_000, "cluster.name", "nested more than 50 levels"),
        ("cluster.name=a\0", "cluster.name", "control character"),
        ("cluster.name=\udcff", "cluster.name", "control character"),
        ("train_jobs.my.workers.min=50", "train_jobs.my.workers.min", "cannot be placed"),
        ("train_jobs=5", "train_jobs", "should be a section of names"),
    ],
)
def test_mistakes_in_settings_are_reported_with_the_text_given(
    setting: str, path: str, words: str, tmp_path: Path
) -> None:
    text = TEXT.replace("cluster:", "cluster:\n  name: x")
    found = [mistake for mistake in mistakes(tmp_path, text, [setting]) if mistake.file == "--set"]
    first = found[0]
    assert (first.line, first.column) == (None, None)
    assert words in first.message
    assert first.path == path
    assert setting[:20].replace("\0", "").rstrip("\udcff") in first.message
    assert "\n" not in str(first)
    assert len(str(first)) < 500


def test_mistakes_of_file_and_settings_come_together_the_file_first(tmp_path: Path) -> None:
    found = mistakes(tmp_path, TEXT.replace("steps: 5", "steps: no"), ["bad", "train_jobs.my.seed=-1"])
    assert [(mistake.file == "--set", mistake.path) for mistake in found] == [
        (False, "train_jobs.my.job.steps"),
        (True, ""),
        (True, "train_jobs.my.seed"),
    ]


def test_a_setting_mends_a_mistake_of_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT.replace("steps: 5", "steps: no"), ["train_jobs.my.job.steps=5"]).config
    assert config.train_jobs["my.job"].steps == 5


def test_a_run_is_changed_for_the_cluster_of_the_file_that_it_is_resumed_from(tmp_path: Path) -> None:
    around = load(tmp_path, TEXT)
    (tmp_path / "mine.py").write_text("from elsewhere import Task\n")
    text = "train_jobs:\n  j: {data: {source: /gone.parquet}, workers: {min: 1}}\n"
    job = change_job(text, "j", ["workers.min=4", "task='mine:Task'"], around)
    assert (job.workers.min, job.data.source) == (4, "/gone.parquet"), "what went later is no mistake"
    for setting, words in (
        ("workers.min=5", "5 workers of 1 CPU each cannot be placed: the nodes head (0 CPUs), worker × 2 (2"),
        ("parallel.tensor=3", "should divide the model's attention heads (8), was 3"),
        ("data.source=./other.parquet", f"`{tmp_path}/other.parquet` does not exist"),
        ("steps=none", "should be a whole number"),
    ):
        with pytest.raises(ConfigError) as raised:
            change_job(text, "j", ["workers.max=6", "batch.global=240", setting], around)
        assert words in str(raised.value)
        assert "gone.parquet" not in str(raised.value)
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "other.parquet")
    changed = change_job(text, "j", ["data.source=other.parquet"], around)
    assert changed.data.source == str(tmp_path / "other.parquet")
