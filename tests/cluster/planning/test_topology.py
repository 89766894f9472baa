"""How ranks form the axes of a mesh."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.sections.parallel import ParallelConfig
from cluster.planning.topology import MeshError, MeshShape, mesh_shape

sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, sizes)
def test_ranks_count_through_the_axes_with_tp_fastest(replicate: int, shard: int, cp: int, tp: int) -> None:
    shape = MeshShape(replicate, shard, cp, tp)
    walked = [
        (i, j, k, m) for i in range(replicate) for j in range(shard) for k in range(cp) for m in range(tp)
    ]
    assert [shape.coordinate(rank) for rank in range(shape.world_size)] == walked
    shares = Counter(shape.data_index(rank) for rank in range(shape.world_size))
    assert shares == dict.fromkeys(range(replicate * shard), cp * tp)
    with pytest.raises(ValueError, match="rank"):
        shape.coordinate(shape.world_size)


@pytest.mark.parametrize(
    ("parallel", "nodes", "shape"),
    [
        ({"strategy": "ddp"}, "aabb", MeshShape(dp_replicate=4)),
        ({"strategy": "zero1", "context": 2}, "aabb", MeshShape(dp_replicate=2, cp=2)),
        ({"strategy": "fsdp", "tensor": 2}, "aabb", MeshShape(dp_shard=2, tp=2)),
        ({"strategy": "zero2", "tensor": 2, "context": 2}, "aabb", MeshShape(cp=2, tp=2)),
        ({"strategy": "hsdp"}, "aabb", MeshShape(dp_replicate=2, dp_shard=2)),
        ({"strategy": "hsdp"}, "aaaa", MeshShape(dp_shard=4)),
        ({"strategy": "hsdp"}, "abcd", MeshShape(dp_replicate=4)),
        ({"strategy": "hsdp"}, "aabbbb", MeshShape(dp_replicate=3, dp_shard=2)),
        ({"strategy": "hsdp"}, "aaab", MeshShape(dp_replicate=4)),
        ({"strategy": "hsdp", "shard": 4}, "aabb", MeshShape(dp_shard=4)),
        ({"strategy": "hsdp", "tensor": 2}, "aaaabbbb", MeshShape(dp_replicate=2, dp_shard=2, tp=2)),
    ],
)
def test_the_mesh_of_a_group(parallel: dict[str, object], nodes: str, shape: MeshShape) -> None:
    assert mesh_shape(ParallelConfig.model_validate(parallel), nodes) == shape


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from([1, 2, 3]))
def test_hsdp_shards_inside_nodes(counts: list[int], tensor: int) -> None:
    nodes = [f"n{index}" for index, count in enumerate(counts) for _ in range(count * tensor)]
    shape = mesh_shape(ParallelConfig(strategy="hsdp", tensor=tensor), nodes)
    assert shape.world_size == len(nodes)
    by_copy: dict[int, set[str]] = {}
    for rank, node in enumerate(nodes):
        by_copy.setdefault(shape.coordinate(rank)[0], set()).add(node)
    assert all(len(of_one) == 1 for of_one in by_copy.values())


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(MeshError, match=r"3 workers .* groups of 2"):
        mesh_shape(ParallelConfig(tensor=2), "aaa")
    with pytest.raises(MeshError, match="shard groups of 3"):
        mesh_shape(ParallelConfig(strategy="hsdp", shard=3), "aaaa")
