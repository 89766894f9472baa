"""The devices of a group, a bundle for each worker: reserved by its driver, found by its workers."""

from __future__ import annotations

import threading

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.node.devices import give_back, reserve, wait_for_placed
from train_jobs.spec import GroupSpec

WAIT_S = 60.0
"""How long a group waits for devices that are granted."""


class NoDevicesError(Exception):
    """The devices of a group are somebody else's still."""


class GroupDevices:
    """Those of one group, from when they are asked for until they are given back.

    They go with the process that has made this, at the latest.

    Args:
        wait_s: how long they may still be held by the group before it, beside the time that Ray needs.
    """

    def __init__(self, spec: GroupSpec, wait_s: float) -> None:
        self._given_back = threading.Event()
        self._lock = threading.Lock()
        self._group: PlacementGroup | None = None
        self._asking = threading.Thread(target=self._ask, args=(spec, wait_s), daemon=True)
        self._asking.start()

    def _ask(self, spec: GroupSpec, wait_s: float) -> None:
        group = reserve(
            name_of(spec),
            [resources_of(spec)] * spec.world_size,
            spec.nodes,
            seconds=WAIT_S + wait_s,
            is_wanted=lambda: not self._given_back.is_set(),
        )
        with self._lock:
            self._group = group
            if group is not None and self._given_back.is_set():
                give_back(group)

    def give_back(self) -> None:
        """Give them back, or up."""
        with self._lock:
            self._given_back.set()
            if self._group is not None:
                give_back(self._group)


def name_of(spec: GroupSpec) -> str:
    """Of the placement group that holds them."""
    return f"shoal-ranks:{spec.job}:{spec.name}"


def resources_of(spec: GroupSpec) -> dict[str, float]:
    """What one worker takes, in Ray's names."""
    workers = spec.config.workers
    resources = {"CPU": float(workers.cpus), "GPU": float(workers.gpus)}
    return {name: amount for name, amount in resources.items() if amount}


def given_gpus(spec: GroupSpec, rank: int, wait_s: float) -> tuple[list[str], list[str]]:
    """Wait for the devices of a group; the GPUs of one of its workers, and of all its workers on that node.

    Raises:
        NoDevicesError: they were not free in time.
    """
    try:
        devices = wait_for_placed(name_of(spec), WAIT_S + wait_s)
    except TimeoutError as error:
        raise NoDevicesError(
            f"the devices of group {spec.name} were not free within {WAIT_S + wait_s:g} s:"
            " somebody uses them who has no lease"
        ) from error
    if not spec.config.workers.gpus:
        return [], []
    on_node = [other for other, node in enumerate(spec.nodes) if node == spec.nodes[rank]]
    look = ray.remote(num_cpus=0, num_gpus=spec.config.workers.gpus, max_retries=0)(_own_gpus)
    asked = [
        look.options(scheduling_strategy=PlacementGroupSchedulingStrategy(devices, bundle)).remote()
        for bundle in on_node
    ]
    found: list[list[str]] = ray.get(asked)
    return found[on_node.index(rank)], sorted(gpu for each in found for gpu in each)


def _own_gpus() -> list[str]:
    """Of the task that runs this, which has the devices of a bundle for a moment."""
    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
