"""The mesh of a group's ranks, built once: torch's process groups for every axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cluster.planning.topology import AXES, MeshShape
from train_jobs.parallel.torch_private import collectives_begun, groups_of_process, set_timeout

AFTER_HANG_S = 30.0
"""By so much later than whoever watches a rank does torch find that it hangs."""


class Mesh:
    """The axes of a group and this rank's place on them; the default process group is there.

    An axis costs a process group, with threads of its own under gloo: the device meshes are made when they
    are asked for, by all ranks alike, and leave axes of one rank out where nobody names them.

    Attributes:
        shape: the size of each axis.
        device: this rank's.

    Args:
        patience_s: longest that ranks wait for one of them that works alone; None takes torch's own default.
    """

    def __init__(self, shape: MeshShape, device: torch.device, patience_s: float | None = None) -> None:
        if shape.world_size != dist.get_world_size():
            raise ValueError(f"a mesh of {shape.world_size} ranks for {dist.get_world_size()}")
        self.shape = shape
        self.device = device
        self._patience = None if patience_s is None else timedelta(seconds=patience_s + AFTER_HANG_S)
        self._limit = self._patience
        self._adopted: set[dist.ProcessGroup] = set()
        replicate, shard, self.cp_index, self.tp_index = shape.coordinate(dist.get_rank())
        self.data_index = replicate * shape.dp_shard + shard

    @cached_property
    def axes(self) -> DeviceMesh:
        """The device mesh with the axes of `cluster.planning.topology.AXES`."""
        return _device_mesh(self.device, self.shape, self._limit)

    @cached_property
    def parameters(self) -> DeviceMesh:
        """The device mesh by which parameters are sharded, axes `dp_replicate`, `dp_shard`, `tp`.

        Ranks of one `cp` group see different parts of the same samples; for parameters they are data-parallel
        ranks like any others, so `cp` is folded into one of the two data axes.
        """
        if self.shape.cp == 1:
            return self.axes
        return _device_mesh(self.device, _folded(self.shape), self._limit)

    def sharding(self) -> DeviceMesh:
        """What `fully_shard` takes: one axis where nothing is replicated, two for hybrid sharding."""
        names = self.parameters.mesh_dim_names
        assert names is not None, "the axes are named"
        if "dp_replicate" not in names or self.parameters["dp_replicate"].size() == 1:
            return self.parameters["dp_shard"]
        return self.parameters["dp_replicate", "dp_shard"]

    @cached_property
    def patient(self) -> dist.ProcessGroup:
        """All ranks, for meeting one that works alone (writes, lists, deletes) for as long as that takes."""
        group = dist.new_group(backend="gloo", timeout=self._patience)
        assert group is not None, "every rank is in it"
        return group

    def meet(self) -> None:
        """Wait for all ranks, whichever of them works alone: nobody waits for it in a group of steps."""
        dist.barrier(group=self.patient)

    def background(self) -> dist.ProcessGroup:
        """A group like that of its own, for another thread: its collectives must not mix with others."""
        group = dist.new_group(backend="gloo", timeout=self._patience)
        assert group is not None, "every rank is in it"
        return group

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """While an engine makes groups of its own for steps, to which it gives torch's limit.

        All ranks begin it together: none that is late may keep another waiting in such a group.
        """
        self.meet()
        before = groups_of_process()
        yield
        made = groups_of_process() - before
        self._adopted |= made
        if self._limit is not None:
            for group in made:
                set_timeout(group, self._limit)

    def limit_steps(self, hang_timeout_s: float) -> None:
        """From now on collectives have the time of a step; until now they had that of the slowest start."""
        self._limit = timedelta(seconds=hang_timeout_s + AFTER_HANG_S)
        for group in self._of_steps():
            set_timeout(group, self._limit)

    def collectives_begun(self) -> int | None:
        """How many collectives of steps this rank has begun; all ranks begin the same, one after another.

        None where torch does not say: it is asked all the time, and must end nothing.
        """
        try:
            return sum(collectives_begun(group, self.device) for group in self._of_steps())
        except RuntimeError:
            return None

    def _of_steps(self) -> set[dist.ProcessGroup]:
        """The groups of steps: not those in which other threads meet, or other groups."""
        assert dist.group.WORLD is not None, "the ranks have met"
        made = [mesh for mesh in (vars(self).get("axes"), vars(self).get("parameters")) if mesh is not None]
        of_axes = (group for mesh in made for group in mesh.get_all_groups())
        return {dist.group.WORLD, *of_axes, *self._adopted}

    @property
    def tp(self) -> DeviceMesh:
        return self.parameters["tp"]

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.axes.get_group("cp")


def _device_mesh(device: torch.device, shape: MeshShape, limit: timedelta | None) -> DeviceMesh:
    """As torch's `init_device_mesh`, which takes no timeout for the groups that it makes."""
    sizes = dict(zip(AXES, (shape.dp_replicate, shape.dp_shard, shape.cp, shape.tp), strict=True))
    named = ("dp_shard",) if shape.dp_shard > 1 else ("dp_replicate", "dp_shard")
    used = {name: size for name, size in sizes.items() if size > 1 or name in named}
    ranks = torch.arange(shape.world_size, dtype=torch.int).reshape(*used.values())
    groups = [_group_of_axis(ranks, dim, name, limit) for dim, name in enumerate(used)]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(used))


def _group_of_axis(ranks: Tensor, dim: int, axis: str, limit: timedelta | None) -> dist.ProcessGroup:
    """This rank's group on an axis of the ranks; made by all ranks alike."""
    if ranks.shape[dim] == ranks.numel():
        assert dist.group.WORLD is not None, "the ranks have met"
        return dist.group.WORLD
    alike = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    group, _ = dist.new_subgroups_by_enumeration(alike, timeout=limit, group_desc=f"mesh_{axis}")
    assert group is not None, "every rank is on every axis"
    return group


def _folded(shape: MeshShape) -> MeshShape:
    """`cp` as part of the axis just outside of it that is in use, so that ranks keep their order."""
    if shape.dp_shard > 1 or shape.dp_replicate == 1:
        return replace(shape, dp_shard=shape.dp_shard * shape.cp, cp=1)
    return replace(shape, dp_replicate=shape.dp_replicate * shape.cp, cp=1)
