"""Other weights in place of those that run: no second copy, the very numbers of the files, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from serve_apps.engine.protocol import EngineConfig, EngineError, SamplingParams, WeightsError
from serve_apps.engine.torch_engine import weights
from serve_apps.engine.torch_engine.model import load_model, read_facts
from serve_apps.engine.torch_engine.runner import Runner, load_together
from serve_apps.engine.torch_engine.torch_options import TorchOptions
from tests.serve_apps.engine.conftest import Reference, save_llama, train_tokenizer

CPU = torch.device("cpu")
PROMPT = list(range(20, 60))
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 0,
}


def save(config: Any, directory: Path, seed: int, **how: Any) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, **how)
    train_tokenizer().save_pretrained(directory)
    return directory


def runner_of(directory: Path, **options: Any) -> Runner:
    config = EngineConfig(str(directory), **options)
    return Runner(config, read_facts(config, str(directory)), TorchOptions.of(config), CPU)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("config", "how"),
    [
        (LlamaConfig(vocab_size=320, tie_word_embeddings=True, **SIZES), {}),
        (LlamaConfig(vocab_size=320, attention_bias=True, **SIZES), {"max_shard_size": "20KB"}),
        # Its files have a tensor for each expert, the model one for all of them.
        (MixtralConfig(vocab_size=320, num_local_experts=4, num_experts_per_tok=2, **SIZES), {}),
    ],
    ids=["tied", "several files", "experts"],
)
def test_the_model_has_the_very_numbers_that_loading_anew_gives(
    config: Any, how: dict[str, Any], precision: Any, tmp_path: Path
) -> None:
    old, new = (save(config, tmp_path / name, seed, **how) for name, seed in (("old", 1), ("new", 2)))
    runner = runner_of(old, precision=precision)
    before = {name: tensor.clone() for name, tensor in runner.model.state_dict().items()}
    load_together(runner, str(new), None)
    expected = load_model(runner.config, str(new), CPU).state_dict()
    found = runner.model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(found[name], tensor) for name, tensor in before.items())
    embeddings = runner.model.get_input_embeddings().weight, runner.model.get_output_embeddings().weight
    assert (embeddings[0] is embeddings[1]) == config.tie_word_embeddings


METER = """
import sys, threading, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from serve_apps.engine.protocol import EngineConfig
from serve_apps.engine.torch_engine.model import load_model, read_facts
from serve_apps.engine.torch_engine.torch_options import TorchOptions
from serve_apps.engine.torch_engine.runner import Runner, load_together

directory = sys.argv[1]
config = LlamaConfig(vocab_size=2048, hidden_size=512, intermediate_size=2048, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64)
LlamaForCausalLM(config).save_pretrained(directory)

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def peak_of(work):
    '''The most memory of its own that the process has while it does something, beyond what it had.'''
    before, most, done = held(), 0, threading.Event()
    def watch():
        nonlocal most
        while not done.wait(0.0005):
            most = max(most, held())
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    most = max(most, held())
    done.set()
    watcher.join()
    return most - before

# Files in fp32 and a model in bf16: what is loaded is memory of the process, and no page of a file.
config = EngineConfig(directory, precision="bf16")
runner = Runner(config, read_facts(config, directory), TorchOptions.of(config), torch.device("cpu"))
size = sum(parameter.nbytes for parameter in runner.model.parameters())
load_together(runner, directory, None)  # what a first time takes
print(size, peak_of(lambda: load_together(runner, directory, None)),
    peak_of(lambda: load_model(config, directory, torch.device("cpu"))))
"""


@pytest.mark.slow
def test_no_second_copy_is_loaded_beside_the_model(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", METER, str(tmp_path / "model")]
    # What is freed goes back to the system at once, and is no room for what comes next.
    environment = {**os.environ, "PYTHONPATH": str(root), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        command, cwd=root, env=environment, timeout=120, check=True, capture_output=True, text=True
    )
    size, in_place, anew = map(int, done.stdout.splitlines()[-1].split())  # libraries may say something
    assert anew > 0.9 * size, "the meter sees a second copy"
    assert in_place < 0.2 * size, "one of the larger tensors, and what reading takes"


class Flaky:
    """A safetensors file whose tensors can be read up to some number of them."""

    def __init__(self, file: Any, left: list[int]) -> None:
        self._file = file
        self._left = left

    def __enter__(self) -> Flaky:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> Any:
        return FlakySlice(self._file.get_slice(name), self._left)


class FlakySlice:
    def __init__(self, slice_: Any, left: list[int]) -> None:
        self._slice = slice_
        self._left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> Any:
        if not self._left[0]:
            raise OSError(5, "Input/output error")
        self._left[0] -= 1
        return self._slice[index]


def fail_after(number: int, bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a directory's tensors be read so many times, and then no more."""
    whole, left = weights.safe_open, [number]

    def opened(path: Path, **how: Any) -> Any:
        file = whole(path, **how)
        return Flaky(file, left) if path.parent == bad else file

    monkeypatch.setattr(weights, "safe_open", opened)


@pytest.fixture(scope="module")
def other(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("other"), seed=99, num_key_value_heads=4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_fail_midway_leave_the_old_ones(
    ranks: int,
    request: pytest.FixtureRequest,
    llama: Path,
    other: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if ranks == 1:
        asker = request.getfixturevalue("start_engine")(llama)
    else:
        asker = request.getfixturevalue("start_replica")(llama).asker
    old, new = reference.generate(PROMPT, 12), Reference(other).generate(PROMPT, 12)
    assert old != new
    for number in (1, 10, 19)[: 4 - ranks]:
        with monkeypatch.context() as patched:
            fail_after(number, other, patched)
            with pytest.raises(WeightsError, match=str(other)):
                asker.run(asker.engine.load_weights(str(other)))
        assert list(asker.greedy(PROMPT, 12).token_ids) == old, number
    asker.run(asker.engine.load_weights(str(other)))
    assert list(asker.greedy(PROMPT, 12).token_ids) == new
    asker.engine.check()


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_the_old_weights_are_gone_too_nothing_answers(
    ranks: int, request: pytest.FixtureRequest, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = save_llama(tmp_path / "own", num_key_value_heads=4)
    start = request.getfixturevalue("start_engine" if ranks == 1 else "start_replica")
    asker = start(own) if ranks == 1 else start(own).asker
    asker.greedy(PROMPT, 2)
    (own / "model.safetensors").unlink()
    fail_after(10, other, monkeypatch)

    async def change() -> Any:
        return await asker.engine.load_weights(str(other))

    with pytest.raises(EngineError):
        asker.run(change())

    def broken() -> bool:
        try:
            asker.engine.check()
        except EngineError as error:
            return "the old weights are not there any more" in str(error)
        return False

    asker.run(asker.until(broken))
    with pytest.raises(EngineError):
        asker.greedy(PROMPT, 2)


def test_a_model_that_computes_otherwise_is_refused_by_what_differs(llama: Path, tmp_path: Path) -> None:
    runner = runner_of(llama)
    changed = tmp_path / "changed"
    shutil.copytree(llama, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1, "use_cache": False}))
    before = {name: tensor.clone() for name, tensor in runner.model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"its rms_norm_eps is 0\.1, and not 1e-06; .* rollout: rolling"):
        load_together(runner, str(changed), None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in runner.model.state_dict().items())


def test_answers_end_as_the_new_version_says(
    start_engine: Callable[..., Any], llama: Path, reference: Reference, tmp_path: Path
) -> None:
    answer = reference.generate(PROMPT, 12)
    end = answer[5]
    changed = tmp_path / "changed"
    shutil.copytree(llama, changed)
    said = json.loads((changed / "generation_config.json").read_text())
    (changed / "generation_config.json").write_text(json.dumps(said | {"eos_token_id": [0, end]}))
    asker = start_engine(llama)
    assert list(asker.greedy(PROMPT, 12).token_ids) == answer
    asker.run(asker.engine.load_weights(str(changed)))
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    found = asker.run(asker.answer(PROMPT, sampling))
    assert list(found.token_ids) == Reference(changed).generate(PROMPT, 12)
    assert (found.finish_reason, found.token_ids[-1]) == ("stop", end)
