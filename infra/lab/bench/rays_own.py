"""Ray's own way to have both on one cluster: an elastic trainer and Serve, each of which asks Ray."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cluster.errors import ShoalError
from cluster.sharing.journal import journal_storage
from cluster.sharing.journal import read_events as read_journal
from infra.lab.bench.load_course import Logs
from infra.lab.bench.own_cluster import OwnCluster
from infra.lab.bench.sharing_plan import MICRO, PLACES, STEP_S, SharingPlan

APP = "rays-own"
METRICS = "metrics.jsonl"
CHECKPOINT_EVERY = 100
"""Steps."""
RESIZE_EVERY_S = 10.0
"""How often the trainer looks for more devices: its default is a minute."""
START_S = 300.0
_LOOK_S = 0.5


class RaysOwn:
    """Has the plan's app and job on a cluster, by Ray's means alone.

    Args:
        model: the directory of the model that is served.
        directory: for what the trainer writes.
    """

    def __init__(self, plan: SharingPlan, cluster: OwnCluster, model: Path, directory: Path) -> None:
        self._plan = plan
        self._cluster = cluster
        self._model = model
        self._directory = directory
        self._ended = threading.Event()
        self._replicas: list[tuple[float, int]] = []
        """How many ran when, in Unix time."""

    @contextmanager
    def running(self) -> Iterator[str]:
        """Both run; yields the base URL of the app. First the app, then the trainer takes what is left."""
        import ray
        from ray import serve

        base_url = self._serve()
        looking = threading.Thread(target=self._look, name="looks at Serve", daemon=True)
        looking.start()
        # A process of its own: it goes on until its cluster ends.
        training = ray.remote(num_cpus=0)(fit).remote(self._plan, self._directory)
        self._until_it_steps(training)
        yield base_url
        self._ended.set()
        looking.join()
        ray.cancel(training, force=True)
        serve.shutdown()

    def metrics(self) -> list[dict[str, Any]]:
        path = self._directory / METRICS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def serving_s(self, since: float, until: float) -> float:
        """Seconds times replicas, from one moment to another, in Unix time."""
        return replica_seconds(self._replicas, since, until)

    def logs(self) -> Logs:
        """What is logged by now; nobody has a lease."""
        record = self._cluster.record
        events = read_journal(journal_storage(record.storage, record.name))
        return Logs(events, [], [], self.metrics(), "", "")

    def _serve(self) -> str:
        from ray import serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        autoscaling = {
            "min_replicas": 1,
            "max_replicas": self._plan.most_replicas,
            **self._plan.autoscale,
        }
        deployment = serve.deployment(
            PlainReplica,
            ray_actor_options={"num_cpus": 1},
            autoscaling_config=autoscaling,
            max_ongoing_requests=1000,
        )
        serve.run(deployment.bind(str(self._model)), name=APP, route_prefix="/v1")
        return f"http://127.0.0.1:{port}/v1"

    def _look(self) -> None:
        from ray import serve

        while not self._ended.wait(_LOOK_S):
            deployments = serve.status().applications[APP].deployments.values()
            running = sum(each.replica_states.get("RUNNING", 0) for each in deployments)
            self._replicas.append((time.time(), running))

    def _until_it_steps(self, training: Any) -> None:
        import ray

        deadline = time.monotonic() + START_S
        while not self.metrics():
            if ray.wait([training], timeout=0)[0]:
                ray.get(training)
            if time.monotonic() > deadline:
                raise ShoalError(f"Ray's trainer did not step within {START_S:.0f} s")
            time.sleep(_LOOK_S)


class PlainReplica:
    """A replica of Serve's that has the engine in its own process, as one writes it without Shoal."""

    def __init__(self, model: str) -> None:
        from ray.serve import get_replica_context
        from transformers import AutoTokenizer

        self._model = model
        self._id = get_replica_context().replica_id.unique_id
        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._engine: Any = None
        self._number = 0

    async def _started(self) -> Any:
        if self._engine is None:
            from serve_apps.engine.protocol import EngineConfig
            from serve_apps.engine.torch_engine.engine import TorchEngine

            extra = {"least_step_ms": STEP_S * 1000}
            config = EngineConfig(
                self._model, device="cpu", threads=1, max_batch=PLACES, max_waiting=1000, extra=extra
            )
            self._engine = TorchEngine(config)
            await self._engine.start()
        return self._engine

    async def check_health(self) -> None:
        await self._started()

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        body = await request.json()
        stream = self._events(body, await self._started())
        headers = {"x-shoal-replica": self._id}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _events(self, body: dict[str, Any], engine: Any) -> Any:
        from serve_apps.engine.protocol import SamplingParams

        sampling = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True, seed=body["seed"])
        self._number += 1
        tokens = 0
        prompt = self._tokenizer.encode(body["prompt"])
        async for delta in engine.generate(f"{self._number}", prompt, sampling):
            tokens += len(delta.token_ids)
            yield _event({"choices": [{"index": 0, "text": delta.text}]})
        yield _event({"choices": [], "usage": {"completion_tokens": tokens}})
        yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def replica_seconds(seen: Sequence[tuple[float, int]], since: float, until: float) -> float:
    """Seconds times replicas from one moment to another, where so many were seen now and then."""
    inside = [each for each in seen if since <= each[0] <= until]
    return sum((after - now) * count for (now, count), (after, _) in pairwise([*inside, (until, 0)]))


def fit(plan: SharingPlan, directory: Path) -> None:
    """Have Ray Train run the plan's elastic job, as it runs one for anybody.

    Args:
        directory: for what it writes.
    """
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    job = plan.config()["train_jobs"]["elastic"]
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "metrics": str(directory / METRICS),
            "sample_s": job["settings"]["sample_s"],
            "micro_batches": job["batch"]["global"] // MICRO,
        },
        scaling_config=ScalingConfig(
            num_workers=(1, plan.most_workers),
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=RESIZE_EVERY_S,
        ),
        run_config=RunConfig(storage_path=str(directory), checkpoint_config=CheckpointConfig(num_to_keep=1)),
    )
    trainer.fit()


def train(config: dict[str, Any]) -> None:
    """What each of the trainer's workers does: the plan's paced task, in plain PyTorch and Ray Train."""
    import tempfile
    from contextlib import nullcontext
    from datetime import UTC, datetime
    from itertools import count

    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from infra.lab.bench.paced_task import PacedTask

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    task = PacedTask(SimpleNamespace(seed=0, settings={"sample_s": config["sample_s"]}))  # type: ignore[arg-type]
    model, data, first = task.build(), task.samples(held_out=False), 1
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved, "state.pt"))
        model.load_state_dict(state["model"])
        first = state["step"] + 1
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = config["micro_batches"] * MICRO
    for step in count(first):
        mine = range(rank, config["micro_batches"], world_size)
        for number in mine:
            at = [(step * samples + number * MICRO + each) % len(data) for each in range(MICRO)]
            batch = {name: torch.stack([data[each][name] for each in at]) for name in data[0]}
            last = number + world_size >= config["micro_batches"]
            with nullcontext() if last or world_size == 1 else model.no_sync():
                (task.loss(model, batch).loss / samples).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            line = {"step": step, "world_size": world_size, "samples": samples}
            with open(config["metrics"], "a") as metrics:
                metrics.write(json.dumps({"time": datetime.now(UTC).isoformat(), **line}) + "\n")
        if step % CHECKPOINT_EVERY:
            continue
        with tempfile.TemporaryDirectory() as saved:
            if rank == 0:
                inner = getattr(model, "module", model)
                torch.save({"model": inner.state_dict(), "step": step}, Path(saved, "state.pt"))
            own = ray.train.Checkpoint.from_directory(saved) if rank == 0 else None
            ray.train.report({"step": step}, checkpoint=own)
