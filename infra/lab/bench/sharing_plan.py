"""What `shoal bench sharing` measures: how many devices, whether they compete for cores, and which load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from infra.lab.bench.load_shapes import SHAPES, LoadShape
from infra.lab.simulator.daily_load import PEAK_USE

SEED = 20_261_130
"""Of the requests that come by themselves: all sides get the same."""
STEPS = "steps"
LOADS = (STEPS, *SHAPES)

STEP_S = 0.08
"""A step of a paced engine."""
FIRST_TOKEN_S = 0.3
"""Until an answer's first token, with room for it: about so much on two cores."""
ONGOING = 8
"""Requests in flight that a replica of one should carry."""
PLACES = 2 * ONGOING
"""Those that it can; Ray Serve's defaults are two and a half times as many."""
TRAIN_STEP_S = 0.2
"""A step of the paced task with the most workers, for each device: so each takes as much of a core."""
SAMPLES = 2
"""Of a worker in that time."""
MICRO = 1
"""Of them in a micro-batch: so few that as much falls to each worker, whatever their number."""

_MODEL = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 2048}
_JOB: dict[str, Any] = {
    "model": _MODEL,
    "data": {"source": "python-stdlib", "sequence_length": 64, "held_out_every": 50},
    "batch": {"global": 24, "micro": 4},
    "evaluate": {"every_steps": None},
    "checkpoint": {"every_steps": 1000},
    "steps": 1_000_000,
}
DELAYS: dict[str, Any] = {"upscale_delay_s": 1, "downscale_delay_s": 3}
BY_ITSELF: dict[str, Any] = {"look_back_period_s": 30, "upscale_delay_s": 0.2, "downscale_delay_s": 8}
"""How an app is scaled under a load that is none of `steps`."""


@dataclass(frozen=True)
class SharingPlan:
    """One measurement.

    Attributes:
        rounds: rises and falls of the load `steps`.
        load: one of LOADS.
        minutes: how long another load lasts.
        paced: each device takes its own time, as if it had a core and more.
        devices: of the cluster, an even number.
    """

    rounds: int = 10
    load: str = STEPS
    minutes: float = 24.0
    paced: bool = False
    devices: int = 4

    @property
    def most_replicas(self) -> int:
        """Of the app, and what the fixed split keeps for it."""
        return self.devices // 2

    @property
    def most_workers(self) -> int:
        """Of the elastic job: all devices but one, which the app's last replica has."""
        return self.devices - 1

    @property
    def fewest_workers(self) -> int:
        """Of the job, while the app has its most replicas."""
        return self.devices - self.most_replicas

    @property
    def autoscale(self) -> dict[str, Any]:
        """Of the paced app, in the words that Ray Serve has for it too."""
        return {"target_ongoing_requests": ONGOING, **(DELAYS if self.load == STEPS else BY_ITSELF)}

    @property
    def answer_tokens(self) -> int:
        """Of each answer."""
        return 24 if self.paced else 48

    @property
    def answer_s(self) -> float:
        """How long an answer is under way, of a paced engine."""
        return FIRST_TOKEN_S + (self.answer_tokens - 1) * STEP_S

    @property
    def high(self) -> int:
        """Clients that ask while the load is high: more than one replica should carry."""
        return 2 * ONGOING if self.paced else 8

    def shape(self) -> LoadShape:
        """The load that is none of `steps`: at its top it takes most of what the fixed split keeps."""
        assert self.paced
        peak = PEAK_USE * self.most_replicas * ONGOING / self.answer_s
        return SHAPES[self.load](peak, self.minutes)

    def at_best(self) -> float | None:
        """How many times the fixed split's workers sharing would give the job on average, if replicas came
        and went with the load, at once and for nothing; None where the load is steps."""
        if self.load == STEPS:
            return None
        workers = 0.0
        shape = self.shape()
        for _, rate, span in shape.rates(SEED):
            ongoing = rate * self.answer_s
            replicas = min(self.most_replicas, max(1, math.ceil(ongoing / ONGOING)))
            workers += span * (self.devices - replicas)
        return workers / shape.lasts_s / self.fewest_workers

    def config(self) -> dict[str, Any]:
        """The sections of the cluster's shoal.yaml."""
        job, app = (self._paced_job(), self._paced_app()) if self.paced else (_JOB, self._plain_app())
        few, most = self.fewest_workers, self.most_workers
        return {
            "cluster": {
                "nodes": [
                    {"name": "head", "cpus": 0},
                    {"name": "worker", "count": 2, "cpus": self.devices // 2},
                ],
                "sharing": {"priority": "serving", "settle_s": 1},
            },
            "train_jobs": {
                "served": {
                    **_JOB,
                    "steps": 20,
                    "checkpoint": {"every_steps": 20},
                    "batch": {"global": 8, "micro": 4},
                    "workers": {"min": 1, "max": 1},
                    "publish": "served",
                },
                "elastic": {**job, "workers": {"min": 1, "max": most}},
                "fixed": {**job, "workers": {"min": few, "max": few}},
            },
            "serve_apps": {
                "shared": {**app, "replicas": {"min": 1, "max": self.most_replicas}},
                "split": {**app, "replicas": {"min": self.most_replicas, "max": self.most_replicas}},
            },
        }

    def _plain_app(self) -> dict[str, Any]:
        # More requests in flight than one replica should carry while the load is high, fewer while it is low.
        return {"model": "served@latest", "autoscale": {"target_ongoing_requests": 3, **DELAYS}}

    def _paced_app(self) -> dict[str, Any]:
        return {
            "model": "served@latest",
            "autoscale": self.autoscale,
            "limits": {"batch": PLACES},
            "engine_kwargs": {"least_step_ms": STEP_S * 1000},
        }

    def _paced_job(self) -> dict[str, Any]:
        left_out = ("model", "data")
        # The more devices, the longer a step of the most workers lasts; one of fewer lasts longer still.
        samples = self.most_workers * self.devices * SAMPLES
        return {
            **{key: value for key, value in _JOB.items() if key not in left_out},
            "task": "infra.lab.bench.paced_task:PacedTask",
            "settings": {"sample_s": TRAIN_STEP_S / SAMPLES},
            "batch": {"global": samples, "micro": MICRO},
        }
