"""A Ray cluster that people have started on three hosts, which share one directory and nothing else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.lab.hosts.host import Host
from tests import waiting
from tests.lans import SHARE, Workplace, needs_hosts, with_replicas, workplace

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

STORAGE = f"{SHARE}/shoal"
QUICK_TO_SEE = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
"""Of Ray: a silent node is dead after a few seconds, and not after a minute."""
ASK = """
import json, sys, time, httpx
body = {"model": "chat", "prompt": "import os", "max_tokens": 8, "temperature": 0}
while True:
    began = time.time()
    try:
        said = httpx.post(f"{sys.argv[1]}/completions", json=body, timeout=20).status_code
    except httpx.HTTPError as error:
        said = type(error).__name__
    print(json.dumps({"began": began, "ended": time.time(), "said": said}), flush=True)
    time.sleep(0.2)
"""
"""Asks an app one thing after another, and prints what came of each."""
STRANGER = """
import json, ray
ray.init(address="auto", namespace="theirs", log_to_driver=False)
class Stranger:
    def answer(self):
        return "here"
made = ray.remote(num_cpus=0)(Stranger)
actor = made.options(name="stranger", lifetime="detached", get_if_exists=True).remote()
answer = ray.get(actor.answer.remote())
namespaces = [each["namespace"] for each in ray.util.list_named_actors(all_namespaces=True)]
print(json.dumps({"answer": answer, "namespaces": namespaces}))
"""
"""Finds an actor of somebody else's, or makes it; prints its answer, and the namespaces of all actors."""
HELLO = """
import os, socket
print(os.environ["WHO"], "says:", open("words.txt").read() + ", on", socket.gethostname())
"""
CONFIG = "/root/shoal.yaml"
TOUR = "/root/tour"
CPUS = {"gpu-1": 2, "gpu-2": 3, "odd": 2}
WAIT_S = 150.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Ray on four hosts: a head without CPUs, two others of two and three, and one without the shared
    directory; and a laptop, which is no node of it and has that directory neither."""
    names = ["head", "gpu-1", "gpu-2", "odd", "laptop"]
    with workplace(tmp_path_factory.mktemp("lab"), names, QUICK_TO_SEE) as lab:
        for name in ("odd", "laptop"):
            done = lab.lan.host(name).run("sh", "-c", f"umount {SHARE} && mkdir {STORAGE}")
            assert done.returncode == 0
        lab.start_ray(lab.head, "--num-cpus=0")
        for name, cpus in CPUS.items():
            lab.start_ray(lab.lan.host(name), f"--num-cpus={cpus}")
        api = {"host": lab.head.address}
        cluster = {"name": "lab", "provider": "existing", "storage": STORAGE, "api": api}
        lab.head.file(CONFIG).write_text(yaml.safe_dump({"cluster": cluster}))
        yield lab


@pytest.fixture(scope="module")
def tour(lab: Workplace) -> dict[str, Any]:
    """What the quickstart says of the cluster, which it leaves up."""
    done = lab.shoal("quickstart", "-f", CONFIG, "--dir", TOUR, "--keep", "--json", timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert "this Ray cluster asks for no token: whoever reaches it can run anything" in done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    for step in report["steps"]:
        print(f"{step['name']}: {step['seconds']:.1f} s: {step['detail']}")
    return report


def test_a_node_that_does_not_fit_is_told_and_not_used(lab: Workplace, tour: dict[str, Any]) -> None:
    assert tour["ok"]
    config = f"{TOUR}/shoal.yaml"
    (odd,) = [row for row in lab.document("status", "-f", config)["nodes"] if row["misfits"]]
    assert odd["name"] == "odd"
    (sentence,) = odd["misfits"]
    assert sentence.startswith(f"node odd cannot write under {STORAGE}/quickstart-")
    assert sentence.endswith(": there is no such directory on it; is it mounted there?")
    assert f"{sentence}; it is not used" in lab.shoal("status", "-f", config).stdout
    runs = (lab.share / "shoal").glob("*/jobs/*/events.jsonl")
    started = [json.loads(line) for run in runs for line in run.read_text().splitlines()]
    used = {rank["node"] for event in started if event["kind"] == "started" for rank in event["ranks"]}
    assert used == {"gpu-1", "gpu-2"}


def test_jobs_are_checked_against_the_nodes_that_are_there(lab: Workplace, tour: dict[str, Any]) -> None:
    assert tour["ok"]
    asked = ("validate", "-f", f"{TOUR}/shoal.yaml", "--set", "train_jobs.stdlib-lm.workers.cpus=4")
    done = lab.shoal(*asked)
    assert done.returncode == 2
    assert "gpu-1 (2 CPUs), gpu-2 (3 CPUs)" in done.stderr
    assert lab.shoal(*asked, "--offline").returncode == 0


def test_the_whole_way_through_shoal(tour: dict[str, Any]) -> None:
    assert {step["name"]: step["ok"] for step in tour["steps"]} == {
        "write the config": True,
        "start the cluster": True,
        "train, and lose a worker": True,
        "recover": True,
        "evaluate": True,
        "publish": True,
        "serve": True,
        "ask": True,
        "share devices under load": True,
    }
    shared = tour["steps"][-1]["detail"]
    assert "steps lost, none of" in shared


def test_a_machine_that_is_no_node_uses_it(lab: Workplace, tour: dict[str, Any]) -> None:
    assert tour["ok"]
    laptop, url = lab.lan.host("laptop"), f"http://{lab.head.address}:8270"
    made = lab.document("token", "ann", "--role", "run", "-f", f"{TOUR}/shoal.yaml")
    assert made["url"] == url
    connect = ("connect", url, "--token-file", "/root/token")
    laptop.file("/root/token").write_text("shoal-of-somebody-else")
    wrong = lab.shoal(*connect, on=laptop)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "this token is unknown here" in wrong.stderr
    assert lab.shoal("status", on=laptop).returncode == 2
    laptop.file("/root/token").write_text(made["token"])
    right = lab.shoal(*connect, on=laptop)
    assert right.returncode == 0, right.stderr
    began = time.monotonic()
    status = lab.shoal("status", "--json", on=laptop)
    print(f"status from a laptop: {time.monotonic() - began:.2f} s")
    assert {node["name"] for node in json.loads(status.stdout)["nodes"]} == {"head", "gpu-1", "gpu-2", "odd"}

    folder = laptop.file("/root/project")
    folder.mkdir()
    (folder / "hello.py").write_text(HELLO)
    (folder / "words.txt").write_text("from a laptop")
    job = {"task": "script", "script": "hello.py", "workers": {"min": 1, "max": 1}, "env": {"WHO": None}}
    (folder / "shoal.yaml").write_text(yaml.safe_dump({"train_jobs": {"hello": job}}))
    command = [sys.executable, "-m", "infra.cli.main", "train", "hello", "-f", "/root/project/shoal.yaml"]
    trained = laptop.run(*command, environment={**lab.variables, "WHO": "ann"}, timeout_s=90)
    assert trained.returncode == 0, trained.stderr
    (said,) = [line for line in trained.stderr.splitlines() if line.startswith("ann says")]
    assert said in ("ann says: from a laptop, on gpu-1", "ann says: from a laptop, on gpu-2")
    logs = lab.shoal("logs", "hello", on=laptop)
    assert said in logs.stdout
    refused = lab.shoal("token", "bob", on=laptop)
    assert (refused.returncode, "needs the role admin" in refused.stderr) == (2, True)


class Asking:
    """Somebody who asks the app, on the head."""

    def __init__(self, lab: Workplace, log: Path) -> None:
        environment = dict(
            line.removeprefix("export ").split("=", 1)
            for line in lab.shoal("env", "-f", f"{TOUR}/shoal.yaml").stdout.splitlines()
        )
        self._log = log
        with log.open("w") as output:
            ask = [sys.executable, "-c", ASK, environment["SHOAL_BASE_URL"]]
            self._process = lab.head.start(*ask, environment=lab.variables, output=output)

    def said(self, since: float = 0.0) -> list[Any]:
        """What came of what was asked since then (Unix time)."""
        answers = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [answer["said"] for answer in answers if answer["began"] >= since]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def app(lab: Workplace, tour: dict[str, Any]) -> None:
    """The tour's app, on the host that it fills: when that one is lost, the other has the CPUs that the app
    and the least of a job need."""
    assert tour["ok"]
    for command in (("unserve", "chat"), ("serve", "chat")):
        done = lab.shoal(*command, "-f", f"{TOUR}/shoal.yaml")
        assert done.returncode == 0, done.stderr
    assert [host.name for host in with_replicas(lab.lan)] == ["gpu-1"]


@pytest.fixture
def asking(lab: Workplace, app: None, tmp_path: Path) -> Iterator[Asking]:
    asking = Asking(lab, tmp_path / "asked")
    yield asking
    asking.end()


def nodes(lab: Workplace) -> dict[str, bool]:
    """Which nodes are alive, as `shoal status` says it."""
    return {row["name"]: row["alive"] for row in lab.document("status", "-f", f"{TOUR}/shoal.yaml")["nodes"]}


def misfits(lab: Workplace) -> set[str]:
    """The nodes that do not fit, as `shoal status` says it."""
    rows = lab.document("status", "-f", f"{TOUR}/shoal.yaml")["nodes"]
    return {row["name"] for row in rows if row["misfits"]}


def test_an_update_and_its_way_back_lose_no_request(lab: Workplace, asking: Asking) -> None:
    config = f"{TOUR}/shoal.yaml"
    wait_for(lambda: len(asking.said()) > 5, "nobody asks")
    (first,) = with_replicas(lab.lan)
    began = time.monotonic()
    lab.document("serve", "chat", "--set", "serve_apps.chat.limits.queue=33", "-f", config)
    print(
        f"updated after {time.monotonic() - began:.1f} s, in which {len(asking.said())} requests were asked"
    )
    wait_for(lambda: first not in with_replicas(lab.lan), "the version before stays")
    assert lab.shoal("rollback", "chat", "-f", config).returncode == 0
    wait_for(lambda: with_replicas(lab.lan) == [first], "the version after stays")
    asked = time.time()
    wait_for(lambda: len(asking.said(asked)) > 5, "nobody asks any more")
    assert set(asking.said()) == {200}


class Training:
    """A job of two groups, whose config the tour has left."""

    def __init__(self, lab: Workplace) -> None:
        config = f"{TOUR}/shoal.yaml"
        (model,) = {row["path"] for row in lab.document("models", "-f", config)}
        tokenizer = f"data.tokenizer={model}"  # saves the time to train another
        job = lab.document("train", "elastic-lm", "--detach", "--set", tokenizer, "-f", config)["job"]
        (self._run,) = lab.share.glob(f"shoal/*/jobs/{job}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        told = [json.loads(line) for line in (self._run / "events.jsonl").read_text().splitlines()]
        return [event for event in told if event["kind"] == kind]

    def steps(self) -> list[int]:
        log = self._run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []

    def nodes(self) -> set[str]:
        """Where a group of it has started."""
        return {rank["node"] for event in self.events("started") for rank in event["ranks"]}

    def wait_for_steps(self) -> None:
        done = len(self.steps())
        wait_for(lambda: len(self.steps()) > done + 20, "the job does not go on")

    def assert_whole(self) -> None:
        logged = self.steps()
        assert logged == list(range(1, len(logged) + 1)), "a step was lost, or done twice"


@pytest.fixture(scope="module")
def training(lab: Workplace, app: None) -> Training:
    return Training(lab)


def test_a_loss_of_power_is_got_over(lab: Workplace, asking: Asking, training: Training) -> None:
    """The host of the app's one replica."""
    (victim,) = with_replicas(lab.lan)
    training.wait_for_steps()
    wait_for(lambda: training.nodes() - {victim.name}, "the job is on that host alone")
    (broker,) = lab.head.running("ray::Broker")
    broker.kill()  # and with it what it knew of the nodes
    wait_for(lambda: misfits(lab) == {"odd"}, "the nodes are not looked at again")
    assert training.events("leaving") == []
    assert set(asking.said()) == {200}

    lose(victim, lab, asking, training)


def lose(victim: Host, lab: Workplace, asking: Asking, training: Training) -> None:
    """Cut the power of the host of the app's replica."""
    cut = time.time()
    victim.cut_power()
    try:
        back_s = wait_for(lambda: 200 in asking.said(cut), "the app does not answer again")
    except AssertionError:
        tell_of(lab)
        print("asked since then:", asking.said(cut))
        raise
    training.wait_for_steps()
    wait_for(lambda: not nodes(lab)[victim.name], "Ray does not notice that the host is gone")
    print(f"the app answered again {back_s:.1f} s after its host had lost its power")
    training.assert_whole()


def tell_of(lab: Workplace) -> None:
    """Print how the app stands, and what everybody on the head has said last."""
    for command in (("status",), ("explain", "chat")):
        done = lab.shoal(*command, "-f", f"{TOUR}/shoal.yaml")
        print(f"shoal {command[0]}:\n{done.stdout}{done.stderr}")
    for log in sorted(lab.head.file("/tmp/ray/session_latest/logs").glob("worker-*.err")):
        if text := log.read_text(errors="replace").strip():
            print(f"{log.name}:", *text.splitlines()[-40:], sep="\n  ")


def test_a_host_that_is_back_is_used_and_may_be_lost_again(
    lab: Workplace, asking: Asking, training: Training
) -> None:
    """That of one of the job's two groups."""
    if all(nodes(lab).values()):  # where this test runs alone
        (victim,) = with_replicas(lab.lan)
        training.wait_for_steps()
        wait_for(lambda: training.nodes() - {victim.name}, "the job is on that host alone")
        lose(victim, lab, asking, training)
    (name,) = [name for name, alive in nodes(lab).items() if not alive]
    victim = lab.lan.host(name)
    victim.boot()
    lab.start_ray(victim, f"--num-cpus={CPUS[name]}")
    before = len(training.events("resized"))
    wait_for(lambda: any(each["joined"] for each in training.events("resized")[before:]), "it is not used")
    assert training.events("started")[-1]["ranks"][0]["node"] == name
    assert nodes(lab) == {"head": True, "gpu-1": True, "gpu-2": True, "odd": True}
    cut, before = time.time(), len(training.events("resized"))
    victim.cut_power()
    wait_for(lambda: len(training.events("resized")) > before, "nobody notices that a group is lost")
    assert training.events("resized")[-1]["lost"] != []
    training.wait_for_steps()
    wait_for(lambda: not nodes(lab)[name], "Ray does not notice that the host is gone")
    assert set(asking.said(cut)) == {200}
    training.assert_whole()


def ask_stranger(lab: Workplace) -> dict[str, Any]:
    """See STRANGER. Ray may say at any time that a node was lost."""
    (said,) = [line for line in lab.python(STRANGER).splitlines() if line.startswith("{")]
    answered: dict[str, Any] = json.loads(said)
    return answered


def test_down_ends_what_is_shoals_and_nothing_else(lab: Workplace, tour: dict[str, Any]) -> None:
    assert tour["ok"]
    assert ask_stranger(lab)["answer"] == "here"
    done = lab.shoal("down", "-f", f"{TOUR}/shoal.yaml")
    assert done.returncode == 0, done.stderr
    said = ask_stranger(lab)
    assert said["answer"] == "here"
    # (Ray Train leaves an actor of its own, which everybody's runs share.)
    assert not {"shoal", "serve"} & set(said["namespaces"])
    assert not lab.head.file("/root/.local/state/shoal").exists()
    assert lab.shoal("status", "-f", f"{TOUR}/shoal.yaml").returncode == 1
