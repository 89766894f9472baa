"""Ray clusters that cannot be used: each a sentence, and nothing is left of the try."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.errors import ShoalError
from cluster.hosts.existing import ExistingProvider, living_dashboard
from cluster.state.record import ClusterRecord, read_record, write_record
from cluster.state.state_directory import require_private, state_directory
from infra.lab.hosts.host import Host
from tests.clusters import LiveCluster, caller_environment, shoal, write_config
from tests.lans import Workplace, needs_hosts, workplace
from tests.waiting import wait_for

TOKEN = "ab" * 32
SERVING = ("ServeController", "ProxyActor", "AppController", "ServeReplica")
"""What processes of Serve's and of the controller of the apps are called."""


def test_where_there_is_no_ray_cluster(tmp_path: Path) -> None:
    nobody = write_config(tmp_path / "a", "lab", "provider: existing", "address: 127.0.0.1:9")
    done = shoal("up", "-f", str(nobody))
    assert (done.returncode, done.stderr) == (1, "no Ray cluster answers at 127.0.0.1:9\n")
    auto = write_config(tmp_path / "b", "lab", "provider: existing")
    done = shoal("up", "-f", str(auto), RAY_ADDRESS="127.0.0.1:9")
    assert "no Ray cluster answers at" in done.stderr
    done = shoal("down", "-f", str(auto))
    assert (done.returncode, done.stdout) == (0, "cluster lab was not up\n")


def test_a_cluster_that_cannot_be_spoken_to_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        config = write_config(tmp_path, "lab", "provider: existing", f"address: {address}")
        done = shoal("up", "-f", str(config))
        assert done.returncode == 1
        assert f"no Ray cluster answers at {address}, though something listens there: does" in done.stderr
        require_private(state_directory("lab"))
        record = ClusterRecord(
            "lab", "1", str(config), str(tmp_path), "/data", "127.0.0.1", address, "", "", 0, None
        )
        write_record(record)
        with pytest.raises(ShoalError, match=f"^what listens at {address} does not .* so nothing is ended: "):
            ExistingProvider().down("lab", said.append)
        assert (read_record("lab"), said) == (record, [])
    assert ExistingProvider().down("lab", said.append)
    assert said == [f"the Ray cluster at {address} does not answer; what is known of it is removed"]
    assert read_record("lab") is None


def test_what_is_private_of_ray_says_what_the_public_says(running_cluster: LiveCluster) -> None:
    source = (
        "import json, os\n"
        "from cluster.ray_private import address_here, node_ids_by_address, authentication_token\n"
        "here = address_here()\n"
        "print(json.dumps([here, sorted(node_ids_by_address(here, 10.0)), authentication_token()]))"
    )
    done = running_cluster.python(source)
    assert done.returncode == 0, done.stderr
    record = running_cluster.record
    assert record.token_path is not None
    with open(record.token_path) as token:
        expected = [record.gcs_address, sorted(node.ip for node in record.nodes), token.read()]
    assert json.loads(done.stdout) == expected


def test_the_dashboard_of_a_head_that_is_dead_is_looked_for_at_the_next() -> None:
    def row(address: str, *, alive: bool) -> dict[str, object]:
        return {"NodeManagerAddress": address, "Alive": alive}

    rows = [row("192.0.2.1", alive=False), row("192.0.2.2", alive=True), row("192.0.2.3", alive=True)]
    rows += [row("192.0.2.2", alive=False), row("2001:db8::1", alive=False)]  # 2 was started again
    moved, stays = "192.0.2.2:8265", None
    expected = {
        "192.0.2.1:8265": moved,
        "192.0.2.2:8265": stays,
        "192.0.2.3:8265": stays,
        "192.0.2.10:8265": stays,  # another interface of a host
        "127.0.0.1:8265": stays,
        "[2001:db8::1]:8265": moved,
    }
    found = {said: living_dashboard(said, "192.0.2.2", rows) for said in expected}
    assert found == {said: where or said for said, where in expected.items()}
    assert living_dashboard("192.0.2.1:80", "2001:db8::2", rows) == "[2001:db8::2]:80"


def test_a_ray_cluster_has_room_for_one_cluster_of_shoal(
    running_cluster: LiveCluster, tmp_path: Path
) -> None:
    config = write_config(tmp_path, "another", "provider: existing", "storage: ./storage")
    variables = {
        key: value for key, value in running_cluster.environment.items() if key not in caller_environment()
    }
    done = shoal("up", "-f", str(config), **variables)
    assert done.returncode == 2
    assert f"this Ray cluster carries the Shoal cluster {running_cluster.record.name} already" in done.stderr


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Ray with a token on one host, and a host beside it."""
    with workplace(tmp_path_factory.mktemp("pair"), ["one", "beside"]) as pair:
        pair.variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        pair.start_ray(pair.head, "--num-cpus=1")
        del pair.variables["RAY_AUTH_MODE"], pair.variables["RAY_AUTH_TOKEN"]
        config = f"cluster: {{name: lab, provider: existing, address: '{pair.head.address}:6379'}}\n"
        for host in pair.lan.hosts:
            host.file("/root/shoal.yaml").write_text(config)
        yield pair


def up(pair: Workplace, host: Host, *options: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "infra.cli.main", "up", "-f", "/root/shoal.yaml", *options]
    done = host.run(*command, environment={**pair.variables, **variables}, timeout_s=60)
    return done.returncode, done.stderr


@needs_hosts
@pytest.mark.slow
def test_a_token_that_is_missing_or_wrong_and_a_machine_that_is_no_node(pair: Workplace) -> None:
    asks = f"the Ray cluster at {pair.head.address}:6379 asks for its token: it is missing or another in"
    for variables in ({}, {"RAY_AUTH_TOKEN": TOKEN[::-1]}, {"RAY_AUTH_MODE": "disabled"}):
        code, said = up(pair, pair.head, **variables)
        assert code == 1
        assert asks in said
    code, said = up(pair, pair.lan.host("beside"), RAY_AUTH_TOKEN=TOKEN)
    assert code == 1
    assert f"this machine is no node of the Ray cluster at {pair.head.address}:6379, whose nodes" in said


@needs_hosts
@pytest.mark.slow
def test_a_machine_without_ray(pair: Workplace) -> None:
    beside = pair.lan.host("beside")
    beside.file("/root/shoal.yaml").write_text("cluster: {name: lab, provider: existing}\n")
    code, said = up(pair, beside)
    assert code == 1
    assert said.startswith("there is no Ray cluster here: this machine is a node of none (`ray start`)")


@needs_hosts
@pytest.mark.slow
def test_an_up_that_fails_leaves_nothing(pair: Workplace) -> None:
    taken = "cluster.gateway.port=22"  # sshd's
    code, said = up(pair, pair.head, "--set", taken, RAY_AUTH_TOKEN=TOKEN)
    assert code == 2
    assert "cluster.gateway.port: 22 on" in said
    assert not pair.head.file("/root/.local/state/shoal").exists()


@needs_hosts
@pytest.mark.slow
def test_the_token_is_kept_for_later_commands_and_forgotten_at_the_end(pair: Workplace) -> None:
    code, said = up(pair, pair.head, RAY_AUTH_TOKEN=TOKEN)
    assert code == 0, said
    kept = pair.head.file("/root/.local/state/shoal/lab/token")
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == (TOKEN, 0o600)
    record = json.loads(kept.with_name("record.json").read_text())
    assert record["env"]["RAY_JOB_STOP_WAIT_TIME_S"] == "120", (
        "Ray's own 3 s are less than a checkpoint takes"
    )
    assert pair.document("status", "-f", "/root/shoal.yaml")["nodes"][0]["name"] == "one"
    assert pair.shoal("down", "-f", "/root/shoal.yaml").returncode == 0
    assert not kept.parent.exists()


@needs_hosts
@pytest.mark.slow
def test_serve_runs_before_an_app_of_the_config_is_served_and_ends_with_the_cluster(pair: Workplace) -> None:
    config = f"cluster: {{name: lab, provider: existing, address: '{pair.head.address}:6379'}}\n"
    document = {**yaml.safe_load(config), "train_jobs": {"lm": {"publish": "chat"}}}
    document["serve_apps"] = {"chat": {"model": "chat@latest"}}
    pair.head.file("/root/shoal.yaml").write_text(yaml.safe_dump(document))

    def serving() -> list[str]:
        return [words for words in SERVING if pair.head.running(words)]

    code, said = up(pair, pair.head, RAY_AUTH_TOKEN=TOKEN)
    assert code == 0, said
    wait_for(lambda: gateway_answers(pair), "no gateway answers", timeout_s=60)
    assert "ServeController" in serving()
    assert pair.shoal("down", "-f", "/root/shoal.yaml").returncode == 0
    assert serving() == []

    for pause_s in (0.0, 2.0, 4.0):  # while all of it starts
        assert up(pair, pair.head, RAY_AUTH_TOKEN=TOKEN)[0] == 0
        time.sleep(pause_s)
        done = pair.shoal("down", "-f", "/root/shoal.yaml")
        assert done.returncode == 0, done.stderr
        assert serving() == []
        time.sleep(3)
        assert serving() == [], "something was about to start it"
    pair.head.file("/root/shoal.yaml").write_text(config)


def gateway_answers(pair: Workplace) -> bool:
    said = pair.shoal("env", "-f", "/root/shoal.yaml").stdout
    (url,) = [line.partition("=")[2] for line in said.splitlines() if "SHOAL_BASE_URL" in line]
    ask = f"import httpx; print(httpx.get('{url}/models').status_code)"
    return pair.head.run(sys.executable, "-c", ask).stdout.strip() in ("200", "401")
