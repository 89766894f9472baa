"""The whole way through Shoal: start, train, lose a worker, publish, serve, share devices."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cluster.config.loader import LoadedConfig, load_config
from cluster.config.template import write_template
from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.hosts.providers import REMOTE_PROVIDERS
from cluster.state.connection import ClusterRecord, connect, disconnect
from infra.job_logs import JobLogs, follow
from infra.lifecycle import bring_up, remote_provider, take_down
from infra.tour.killer import Killer
from infra.tour.tour_config import APP, ELASTIC_JOB, JOB, above, adapt, below
from infra.tour.tour_report import QuickstartReport, StepError, TourStep, require
from train_jobs.driver.submission import Submissions, new_job_id
from train_jobs.records.listing import result_of, run_of

PROMPT = "import os\n\n\ndef "
REQUEST_TIMEOUT_S = 60.0
CLIENTS = 8
"""Requests that the load keeps in flight: more than one replica should carry by the config's target."""


class Quickstart:
    """Runs the tour in a directory.

    Args:
        directory: empty; config and storage go there.
        say: takes each sentence about what happens.
        keep: leave the cluster running at the end.
        around: a config whose `cluster` the tour is to run on, under another name and in a place of its own
            below the storage; None for raylets of this machine.
        name: of the cluster.
    """

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], None],
        *,
        keep: bool = False,
        around: LoadedConfig | None = None,
        name: str | None = None,
    ) -> None:
        self.directory = directory
        self.around = around
        self.say = say
        self.keep = keep
        self.report = QuickstartReport()
        self.config_path = directory / "shoal.yaml"
        # Of its own: the tour must not meet a cluster that somebody uses.
        self.name = name or f"quickstart-{os.getpid()}"

    def run(self) -> QuickstartReport:
        """All steps until one fails; the cluster is down at the end unless it is kept.

        Whatever happens, Ctrl-C included, no process stays behind.
        """
        began = time.monotonic()
        try:
            try:
                self._tour()
                self.report.ok = True
            except ShoalError as error:
                self.say(f"failed: {error}")
            if not self.keep:
                with self._step("stop the cluster") as step:
                    self._down(step)
        except BaseException:
            self._down(TourStep("stop the cluster"))
            raise
        self.report.ok = all(step.ok for step in self.report.steps)
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def _tour(self) -> None:
        with self._step("write the config") as step:
            loaded = self._write_config(step)
        if loaded.config.cluster.provider in REMOTE_PROVIDERS:
            self._tour_elsewhere(loaded)
            return
        with self._step("start the cluster") as step:
            record = self._up(loaded, step)
        connect(record)
        try:
            run = self._train(loaded, record)
            with self._step("evaluate") as step:
                self._check_evaluation(run, step)
            with self._step("publish") as step:
                self._check_model(run, step)
            job = self._submit_elastic(loaded, record, run)  # it starts up meanwhile
            with self._step("serve") as step:
                base_url = self._serve(loaded, step)
            with self._step("ask") as step:
                self._ask(base_url, step)
            with self._step("share devices under load") as step:
                self._share(record, job, base_url, step)
        finally:
            disconnect()

    def _tour_elsewhere(self, loaded: LoadedConfig) -> None:
        """The tour of a cluster whose nodes are elsewhere: on its head."""
        began = time.monotonic()
        command = ["quickstart", "--as", self.name, "--json", *(["--keep"] if self.keep else [])]
        with self._step("start the hosts, and go on there") as step:
            cluster = loaded.resolved.cluster
            done = remote_provider(cluster).up(cluster, loaded.path, self.say, command, stay=self.keep)
            step.detail = f"{cluster.node_count} hosts"
        step.seconds = round(time.monotonic() - began - done.document["seconds"], 1)
        self.report.steps += [TourStep(**each) for each in done.document["steps"][1:]]

    @contextmanager
    def _step(self, name: str) -> Iterator[TourStep]:
        step = TourStep(name)
        self.report.steps.append(step)
        self.say(f"── {name}")
        began = time.monotonic()
        try:
            yield step
            step.ok = True
        except ShoalError as error:
            step.detail = str(error)
            raise
        finally:
            step.seconds = round(time.monotonic() - began, 1)
        self.say(f"   {step.detail} ({step.seconds:.1f} s)")

    # -- the cluster ------------------------------------------------------------------------------------

    def _write_config(self, step: TourStep) -> LoadedConfig:
        write_template(self.directory)
        text = adapt(self.config_path.read_text(), self.name, self._cluster())
        self.config_path.write_text(text)
        step.detail = str(self.config_path)
        return load_config(self.config_path)

    def _cluster(self) -> dict[str, Any] | None:
        """The section `cluster` that the tour is to run on."""
        if self.around is None:
            return None
        theirs = self.around.resolved.cluster
        section: dict[str, Any] = theirs.model_dump(mode="json", exclude_unset=True)
        return {**section, "storage": below(above(theirs.storage, self.name), self.name)}

    def _up(self, loaded: LoadedConfig, step: TourStep) -> ClusterRecord:
        cluster = loaded.resolved.cluster
        record = bring_up(cluster, loaded.path, self.say, serves=True)[0].record
        step.detail = f"{cluster.provider}; Ray dashboard at {record.dashboard_url}"
        return record

    def _down(self, step: TourStep) -> None:
        if not self.config_path.exists():
            return
        loaded = load_config(self.config_path, across=False)
        cluster = loaded.config.cluster
        elsewhere = cluster.provider in REMOTE_PROVIDERS
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it
        try:
            take_down(cluster, loaded.path, self.say)
        finally:
            signal.signal(signal.SIGINT, before)
        step.detail = "every process that was started has ended"
        if self.around is not None and self.report.ok and not elsewhere:
            Storage(above(self.around.resolved.cluster.storage, self.name)).delete_dir(self.name)

    # -- training ---------------------------------------------------------------------------------------

    def _train(self, loaded: LoadedConfig, record: ClusterRecord) -> dict[str, Any]:
        """Train with a worker killed half-way; the document that `shoal train` returns."""
        storage = Storage(record.storage)
        config = loaded.resolved.train_jobs[JOB]
        job = new_job_id(JOB)
        with self._step("train, and lose a worker") as step:
            submissions = Submissions(record)
            submissions.submit(storage, job, JOB, config, job, loaded.base)
            view = Killer(config.steps, self.say)
            run = run_of(storage, job)
            follow(JobLogs(run, job), lambda: submissions.status(job), view)
            result = result_of(storage, job)
            require(result["status"] == "succeeded", f"the job {result['status']}: {result['error']}")
            require(view.killed_at is not None, "the job ended before a worker was killed")
            first, last = self._losses(run)
            require(last < 0.75 * first, f"the loss fell from {first:.3f} to {last:.3f} only")
            step.detail = (
                f"FSDP on {result['world_sizes'][0]} workers: loss {first:.3f} → {last:.3f} "
                f"({(1 - last / first) * 100:.0f} % less) in {config.steps} steps"
            )
        with self._step("recover") as step:
            again = self._steps_run_again(run)
            require(result["attempts"] == 2, f"the job took {result['attempts']} attempts, not 2")
            require(bool(again), "no step was run again")
            require(all(again.values()), f"steps {[s for s, same in again.items() if not same]} differ")
            assert view.first_step_again_s is not None
            step.detail = (
                f"killed at step {view.killed_at}, stepping again {view.first_step_again_s:.1f} s later; "
                f"steps {min(again)}–{max(again)} ran twice, with losses equal to the last bit"
            )
        return result

    @staticmethod
    def _losses(run: Storage) -> tuple[float, float]:
        """Mean loss of the first and of the last three steps."""
        from train_jobs.records.run_log import read_metrics

        losses = [line["loss"] for line in read_metrics(run)]
        return sum(losses[:3]) / 3, sum(losses[-3:]) / 3

    @staticmethod
    def _steps_run_again(run: Storage) -> dict[int, bool]:
        """Every step that two attempts ran, and whether both had the same loss."""
        from train_jobs.records.run_log import read_all_metrics

        losses: dict[int, list[float]] = {}
        for metric in read_all_metrics(run):
            losses.setdefault(metric["step"], []).append(metric["loss"])
        return {step: len(set(seen)) == 1 for step, seen in losses.items() if len(seen) > 1}

    def _check_evaluation(self, result: dict[str, Any], step: TourStep) -> None:
        evaluation = result["evaluation"]
        require(evaluation is not None, "nothing was evaluated")
        step.detail = (
            f"held-out loss {evaluation['loss']:.3f}, perplexity {evaluation['perplexity']:.1f} "
            f"over {evaluation['tokens']} tokens, each once"
        )

    def _check_model(self, result: dict[str, Any], step: TourStep) -> None:
        from cluster.models.registry import Registry

        require(result["model"] is not None, "nothing was published")
        loaded = load_config(self.config_path, across=False)
        version = Registry(Storage(loaded.resolved.cluster.storage)).resolve(result["model"])
        missing = {"config.json", "model.safetensors", "tokenizer.json"} - set(Storage(version.path).list())
        require(not missing, f"{version.path} lacks {', '.join(sorted(missing))}")
        step.detail = f"{result['model']} in {version.path}, a Hugging Face directory"

    # -- serving ----------------------------------------------------------------------------------------

    def _serve(self, loaded: LoadedConfig, step: TourStep) -> str:
        from serve_apps.commands import deploy

        served = deploy(loaded.resolved, [APP], say=self.say)
        (row,) = served["apps"]
        wanted = loaded.config.serve_apps[APP].replicas.min
        require(row["replicas"] >= wanted, f"{row['replicas']} replicas run, not {wanted}")
        step.detail = (
            f"{row['model']} on {row['replicas']} replicas of {row['tensor']} tensor-parallel ranks "
            f"at {served['base_url']}"
        )
        return str(served["base_url"])

    def _ask(self, base_url: str, step: TourStep) -> None:
        """One streamed completion, asked as any OpenAI client asks."""
        text, first_s, began = "", 0.0, time.monotonic()
        body = {"model": APP, "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "stream": True}
        chunks, whole = 0, False
        with httpx.stream("POST", f"{base_url}/completions", json=body, timeout=REQUEST_TIMEOUT_S) as answer:
            if answer.status_code != 200:
                raise StepError(f"{base_url}/completions answered {answer.status_code}: {answer.read()!r}")
            for line in answer.iter_lines():
                whole = whole or line == "data: [DONE]"
                if whole or not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                require("error" not in event, f"the stream broke off: {line[6:]}")
                first_s = first_s or time.monotonic() - began
                chunks += 1
                text += "".join(choice["text"] for choice in event["choices"])
            version = answer.headers["x-shoal-model-version"]
        require(whole, "the stream ended before its last event")
        require(bool(text), "the answer was empty")
        for line in f"{PROMPT}{text}".splitlines():
            self.say(f"   | {line}")
        step.detail = f"{version} answered in {chunks} chunks, the first after {first_s * 1000:.0f} ms"

    def _submit_elastic(self, loaded: LoadedConfig, record: ClusterRecord, trained: dict[str, Any]) -> str:
        """Submit the job that takes what is idle; returns its id."""
        from cluster.models.registry import Registry

        storage, config = Storage(record.storage), loaded.resolved.train_jobs[ELASTIC_JOB]
        tokenizer = Registry(storage).resolve(trained["model"]).path  # saves the time to train another
        config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})
        job = new_job_id(ELASTIC_JOB)
        Submissions(record).submit(storage, job, ELASTIC_JOB, config, job, loaded.base)
        return job

    def _share(self, record: ClusterRecord, job: str, base_url: str, step: TourStep) -> None:
        """An elastic job takes what is idle, gives a device to the app under load, and takes it back."""
        from infra.lab.bench.clients import SteadyLoad
        from infra.lab.bench.give_and_take import GiveAndTake, logs_of
        from infra.lab.bench.job_watch import JobWatch
        from infra.lab.bench.load_course import between, fall, lost_and_repeated, rise
        from serve_apps.status import app_statuses

        load = SteadyLoad(base_url, APP, PROMPT, CLIENTS, max_tokens=64)
        try:
            with load:
                watch = JobWatch(run_of(Storage(record.storage), job))
                sharing = GiveAndTake(watch, load, low=0, high=CLIENTS)
                turn = sharing.round(2, replicas=_replicas(app_statuses()))
        finally:
            Submissions(record).stop(job)
        reasons = ", ".join(failure.reason for failure in load.failures[:3])
        require(not load.failures, f"{len(load.failures)} requests failed: {reasons}")
        gave_up = turn.workers_before - turn.workers_under_load
        logs = logs_of(record, job, APP)
        lost, again = lost_and_repeated(logs.metrics)
        require(not lost and not again, f"{len(lost)} steps were lost, {len(again)} done twice")
        rose, fell = rise(logs, turn, load.first_tokens), fall(logs, turn)
        left_s, first_s = between(rose, "load", "way out"), between(rose, "load", "first token")
        back_s = between(fell, "load", "group start")
        require(
            None not in (left_s, first_s, back_s),
            f"the events of {APP} and of {job} do not tell all of the course",
        )
        step.detail = (
            f"{CLIENTS} clients: training gave up {gave_up} of {turn.workers_before} workers after"
            f" {left_s:.1f} s, a new replica's first token came after {first_s:.1f} s, and"
            f" {back_s:.1f} s after the load training had its workers back; none of {len(logs.metrics)}"
            f" steps lost, none of {len(load.answers)} requests"
        )


def _replicas(rows: list[dict[str, Any]]) -> int:
    return next(row["replicas"] for row in rows if row["name"] == APP)
