"""Models that do not fit: refused before they are loaded, with what is needed, what there is, what helps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config.models.model_memory import ModelMemory
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.memory_check import check_device, check_node, memory_of
from serve_apps.engine.node_memory import available_bytes, cgroup_rooms
from serve_apps.engine.protocol import EngineConfig, EngineError, WeightsError
from tests.serve_apps.engine.conftest import Asker, needs_vllm, save_llama

GIB = 2**30
QUICKLY_S = 20.0


def save_huge(directory: Path) -> Path:
    """A model of 8 TiB, of which only the beginning is on the disk."""
    save_llama(directory, hidden_size=128, intermediate_size=128, num_attention_heads=2)
    size = 4 << 40
    header = json.dumps(
        {
            "model.embed_tokens.weight": {
                "dtype": "BF16",
                "shape": [size // 256, 128],
                "data_offsets": [0, size],
            }
        }
    ).encode()
    with open(directory / "model.safetensors", "wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header)
        weights.truncate(8 + len(header) + size)
    return directory


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_huge(tmp_path_factory.mktemp("huge"))


def test_what_a_model_takes_is_counted_from_its_files(gqa_llama: Path, huge: Path) -> None:
    one = memory_of(EngineConfig(str(gqa_llama)), str(gqa_llama))
    assert one is not None
    # The file holds the same numbers in fp32, and a header of a few KiB.
    assert 0 < (gqa_llama / "model.safetensors").stat().st_size - one.weight_bytes < 10_000
    # 2 layers of 2 heads of 8 numbers, keys and values, 512 tokens.
    assert one.cache_bytes == 2 * 2 * 2 * 8 * 512 * 4
    half = memory_of(EngineConfig(str(gqa_llama), precision="bf16", context_length=100), str(gqa_llama))
    assert half == ModelMemory(one.weight_bytes // 2, 2 * 2 * 2 * 8 * 100 * 2)
    given = memory_of(EngineConfig(str(gqa_llama), tensor=2, kv_cache_bytes=GIB), str(gqa_llama))
    assert given == ModelMemory(one.weight_bytes, 2 * GIB)
    assert memory_of(EngineConfig(str(huge)), str(huge)).weight_bytes == 8 << 40  # type: ignore[union-attr]
    assert memory_of(EngineConfig("/no/where"), "/no/where") is None


def test_a_node_without_enough_memory_is_named_with_what_helps() -> None:
    memory = ModelMemory(26 * GIB, 2 * GIB)
    check_node(EngineConfig("/m"), memory, 28 * GIB)
    with pytest.raises(EngineError) as refused:
        check_node(EngineConfig("/m"), memory, 28 * GIB - 1)
    assert str(refused.value) == (
        "the model /m does not fit in this node's memory: a replica needs 28.0 GiB at the least (26.0 GiB of "
        "weights in fp32 and 2.0 GiB of KV cache), and 28.0 GiB are available; use precision: bf16, set a "
        "shorter context_length, serve it on a node with more memory"
    )
    config = EngineConfig("/m", tensor=2, precision="bf16", kv_cache_bytes=GIB)
    with pytest.raises(EngineError) as refused:
        check_node(config, memory, 20 * GIB)
    assert "a replica of 2 ranks, all of them on this node, needs 28.0 GiB" in str(refused.value)
    assert "give the KV cache less memory" in str(refused.value)
    assert "bf16," not in str(refused.value)


def test_a_device_holds_the_share_of_one_rank() -> None:
    memory = ModelMemory(130 * GIB, 20 * GIB)
    check_device(EngineConfig("/m", tensor=2, precision="bf16"), memory, 75 * GIB, "H100")
    check_device(EngineConfig("/m"), None, 0, "H100")
    with pytest.raises(EngineError) as refused:
        check_device(EngineConfig("/m", tensor=2, precision="bf16"), memory, 75 * GIB - 1, "NVIDIA H100")
    assert str(refused.value) == (
        "the model /m does not fit in the memory of NVIDIA H100: each of its 2 ranks needs 75.0 GiB at the "
        "least (65.0 GiB of weights in bf16 and 10.0 GiB of KV cache), and 75.0 GiB are free; set a shorter "
        "context_length, set a larger tensor, or serve it on devices with more memory"
    )


def test_the_torch_engine_refuses_before_it_loads(huge: Path) -> None:
    asker = Asker(find_engine("torch").load_engine()(EngineConfig(str(huge)), "127.0.0.1", 0))
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"needs 8192\.0 GiB at the least .* are available; use precision"):
        asker.run(asker.engine.start())
    assert time.monotonic() - began < QUICKLY_S
    assert psutil.Process().memory_info().rss < 4 * GIB
    asker.close()


@pytest.mark.slow
def test_two_ranks_are_refused_together(huge: Path, start_replica: Callable[..., Any]) -> None:
    with pytest.raises(EngineError, match="a replica of 2 ranks"):
        start_replica(huge, extra={"start_timeout_s": 5.0})


def test_a_larger_model_takes_no_memory_before_it_is_refused_as_other_weights(
    llama: Path, huge: Path, start_engine: Callable[..., Asker]
) -> None:
    asker = start_engine(llama)
    before = asker.greedy([5, 6], 8)
    with pytest.raises(WeightsError, match="is a model of another shape"):
        asker.run(asker.engine.load_weights(str(huge)))
    assert asker.greedy([5, 6], 8) == before
    assert psutil.Process().memory_info().rss < 4 * GIB


@needs_vllm
@pytest.mark.slow
def test_vllm_is_not_started_for_a_model_that_does_not_fit(huge: Path) -> None:
    before = psutil.Process().children()
    asker = Asker(find_engine("vllm").load_engine()(EngineConfig(str(huge), tensor=2), "127.0.0.1", 0))
    with pytest.raises(
        EngineError, match=r"a replica of 2 ranks.* needs 8192\.. GiB at the least .* available"
    ):
        asker.run(asker.engine.start())
    assert set(psutil.Process().children()) <= set(before)
    asker.close()


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_kv_cache_that_vllm_finds_too_small_is_explained(tensor: int, wide: Path) -> None:
    config = EngineConfig(
        str(wide), tensor=tensor, context_length=512, kv_cache_bytes=2**18, extra={"enforce_eager": True}
    )
    asker = Asker(find_engine("vllm").load_engine()(config, "127.0.0.1", 0))
    with pytest.raises(
        EngineError, match=r"vLLM could not start: .*(KV cache|cache blocks).*kv_cache\.memory_gib"
    ) as refused:
        asker.run(asker.engine.start(), 120.0)
    assert "Traceback" not in str(refused.value)
    assert "root cause" not in str(refused.value)
    asker.close()


def write_cgroup(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content + "\n")


def test_the_tightest_cgroup_counts_and_file_pages_are_free(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    stat = "anon 90\ninactive_file 30\nactive_file 20\nfile 60"
    write_cgroup(root / "a", memory__max="1000", memory__current="400", memory__stat=stat)
    write_cgroup(root / "a" / "b", memory__max="max", memory__current="300", memory__stat=stat)
    write_cgroup(root / "a" / "b" / "c", memory__max="500", memory__current="100", memory__stat=stat)
    own.write_text("0::/a/b/c\n")
    assert list(cgroup_rooms(root, own)) == [500 - 100 + 50, 1000 - 400 + 50]
    own.write_text("0::/not/visible/from/here\n")
    assert list(cgroup_rooms(root, own)) == []
    assert list(cgroup_rooms(root, tmp_path / "none")) == []


def test_cgroups_of_version_1_count_too(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    stat = "total_inactive_file 30\ntotal_active_file 20"
    files = {"memory__usage_in_bytes": "700", "memory__stat": stat}
    write_cgroup(root / "memory" / "a", memory__limit_in_bytes="600", **files)
    own.write_text("5:cpu:/a\n4:memory,hugetlb:/a\n0::/\n")
    assert list(cgroup_rooms(root, own)) == [0]
    write_cgroup(root / "memory" / "a", memory__limit_in_bytes="900", **files)
    assert list(cgroup_rooms(root, own)) == [250]


def test_what_is_available_here_is_no_more_than_the_machine_has() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
