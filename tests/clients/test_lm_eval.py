"""lm-eval, the harness of most published results, over HTTP: it measures what it measures by itself."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import python_of
from tests.clusters import started
from tests.serve_apps.tiny_model import make_model

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

APP = "tiny"
CONTEXT = 128
CHOICES, WORDS = "shoal_choices", "shoal_words"
TASKS = {
    CHOICES: """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    WORDS: """
output_type: generate_until
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 24, temperature: 0.0, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
num_fewshot: 0
metadata: {{version: 1}}
"""
SUBJECTS = ["fish", "water", "a train", "鱼", "stone", "three apples", "snow", "é"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two tasks: which of four answers is likelier, and what the model goes on with."""
    folder = tmp_path_factory.mktemp("tasks")
    rows: dict[str, list[dict[str, Any]]] = {CHOICES: [], WORDS: []}
    for number, subject in enumerate(SUBJECTS * 2):
        question = f"Question {number}: what is {subject} like?\nAnswer:"
        choices = ["cold", "red and round", "fast", "hard 石"]
        rows[CHOICES].append({"question": question, "choices": choices, "answer": number % 4})
        rows[WORDS].append({"question": question, "answer": "cold"})
    for name, own in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, data=data) + own)
    return folder


@pytest.fixture(scope="module")
def base_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the model is served, the only app of a cluster: lm-eval's tokenizer names none."""
    nodes = "nodes: [{name: head, cpus: 0}, {name: worker, cpus: 1}]"
    with started(tmp_path_factory.mktemp("cluster") / "one", nodes, "storage: ./storage") as cluster:
        path = cluster.config_path
        path.write_text(f"{path.read_text()}serve_apps:\n  {APP}: {{model: {model}}}\n")
        done = cluster.shoal("serve", APP, "--json")
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)["base_url"]


def evaluate(
    tasks: Path, out: Path, names: list[str], kind: str, batch_size: int = 1, **arguments: object
) -> dict[str, Any]:
    """Run lm-eval; the metrics of each task, and what the model said to each of its documents."""
    said = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(python_of("lm_eval")), "-m", "lm_eval", "run", "--model", kind, "--model_args", said]
    command += ["--tasks", *names, "--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--device", "cpu", "--batch_size", str(batch_size)],
        env={**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (results,) = out.rglob("results_*.json")
    samples = {}
    for name in names:
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = sorted(found, key=lambda sample: sample["doc_id"])
    return {"results": json.loads(results.read_text())["results"], "samples": samples}


@pytest.fixture(scope="module")
def expected(model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lm-eval measures of the same directory by itself, with transformers."""
    out = tmp_path_factory.mktemp("hf")
    return evaluate(tasks, out, [CHOICES, WORDS], "hf", pretrained=model, dtype="float32", max_length=CONTEXT)


def served_by(base_url: str, **more: object) -> dict[str, object]:
    common = {"model": APP, "base_url": f"{base_url}/completions", "max_length": CONTEXT, "num_concurrent": 4}
    return {**common, **more}


def likelihoods(run: dict[str, Any]) -> list[list[tuple[float, bool]]]:
    """Of each document and each of its choices: the log-likelihood, and whether greedy would say it."""
    return [
        [(float(one[0][0]), str(one[0][1]) == "True") for one in sample["resps"]]
        for sample in run["samples"][CHOICES]
    ]


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_choices_are_as_likely_as_in_transformers(
    backend: str,
    batch_size: int,
    base_url: str,
    model: Path,
    tasks: Path,
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    tokenizer = {"tokenizer": model} if backend == "huggingface" else {}
    arguments = served_by(base_url, tokenizer_backend=backend, **tokenizer)
    found = evaluate(tasks, tmp_path, [CHOICES], "local-completions", batch_size, **arguments)
    for ours, theirs in zip(likelihoods(found), likelihoods(expected), strict=True):
        assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    for metric in ("acc,none", "acc_norm,none"):
        assert found["results"][CHOICES][metric] == expected["results"][CHOICES][metric]


@pytest.mark.parametrize("backend", ["huggingface", "None"])
def test_what_is_generated_is_what_transformers_generates(
    backend: str, base_url: str, model: Path, tasks: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = {"tokenizer": model} if backend == "huggingface" else {}
    arguments = served_by(base_url, tokenizer_backend=backend, **tokenizer)
    found = evaluate(tasks, tmp_path, [WORDS], "local-completions", **arguments)

    def answers(run: dict[str, Any]) -> list[str]:
        # Bytes that are no text, of which a random model writes many, are told in different ways.
        return [sample["resps"][0][0].replace("\ufffd", "") for sample in run["samples"][WORDS]]

    assert answers(found) == answers(expected)
    assert any(answers(expected))
