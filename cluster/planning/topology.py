"""Mesh arithmetic: how the ranks of a group form the axes of a mesh. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config.sections.parallel import REPLICATING, ParallelConfig

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""The axes of every mesh, outermost first: neighbouring ranks, which share a node, differ in `tp`."""


class MeshError(ValueError):
    """The ranks cannot form the mesh that the config asks for; the message is a sentence."""


@dataclass(frozen=True)
class MeshShape:
    """The size of each axis; ranks count through them with `tp` fastest.

    Attributes:
        dp_replicate: copies of the sharded (or whole) model.
        dp_shard: ranks over which one copy is sharded.
        cp: ranks that share a sequence.
        tp: ranks that share every matrix product.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """How many parts a global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_averaged(self) -> int:
        """Ranks over which a strategy averages gradients: those of the data and context axes."""
        return self.num_data_ranks * self.cp

    def coordinate(self, rank: int) -> tuple[int, int, int, int]:
        """The rank's index on each axis, in the order of AXES."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of {self.world_size}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        replicate, shard = divmod(rest, self.dp_shard)
        return replicate, shard, cp, tp

    def data_index(self, rank: int) -> int:
        """The rank's index among the data-parallel ranks; those that share samples have the same."""
        replicate, shard, _, _ = self.coordinate(rank)
        return replicate * self.dp_shard + shard


def mesh_shape(parallel: ParallelConfig, rank_nodes: Sequence[str]) -> MeshShape:
    """The mesh of a group.

    Args:
        rank_nodes: the node of every rank, in rank order; `hsdp` shards inside a node by default.

    Raises:
        MeshError: the ranks cannot be divided so.
    """
    world_size, inner = len(rank_nodes), parallel.tensor * parallel.context
    data, rest = divmod(world_size, inner)
    if rest:
        raise MeshError(
            f"{world_size} workers cannot be divided into groups of {inner} "
            f"(tensor {parallel.tensor} × context {parallel.context})"
        )
    if parallel.strategy in REPLICATING:
        return MeshShape(dp_replicate=data, cp=parallel.context, tp=parallel.tensor)
    if parallel.strategy != "hsdp":
        return MeshShape(dp_shard=data, cp=parallel.context, tp=parallel.tensor)
    shard = parallel.shard or _ranks_of_one_node(rank_nodes, inner)
    if data % shard:
        raise MeshError(
            f"{data} data-parallel ranks cannot be divided into shard groups of {shard} (parallel.shard)"
        )
    return MeshShape(data // shard, shard, parallel.context, parallel.tensor)


def _ranks_of_one_node(rank_nodes: Sequence[str], inner: int) -> int:
    """The largest shard group that never crosses a node; 1 where nodes hold no whole number of them."""
    each = math.gcd(*Counter(rank_nodes).values())
    return each // inner if each % inner == 0 else 1
