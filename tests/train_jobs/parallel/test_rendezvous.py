"""How ranks find one another, on one host and between hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from infra.lab.hosts import network
from infra.lab.hosts.network import CabledNetwork
from train_jobs.parallel import rendezvous
from train_jobs.parallel.rendezvous import (
    interface_of,
    join,
    open_store,
    reach_store,
    record_flights,
    use_interface_of,
)

SETTING = "GLOO_SOCKET_IFNAME"
RANK = """
import sys
import torch, torch.distributed as dist
from train_jobs.parallel.rendezvous import open_store, reach_store, use_interface_of

rank, host = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    store, address = open_store(host)
    print(address, flush=True)
else:
    store = reach_store(sys.argv[3])
use_interface_of(host)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
sums = torch.tensor([1.0 + rank])
dist.all_reduce(sums)
print(sums.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None


@pytest.mark.parametrize("setting", [SETTING, "NCCL_SOCKET_IFNAME"])
def test_what_the_user_has_said_stays(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(setting, "bond0")
    use_interface_of("127.0.0.1")
    assert os.environ[setting] == "bond0"
    monkeypatch.delenv(setting)
    use_interface_of("203.0.113.7")
    assert setting not in os.environ
    use_interface_of("127.0.0.1")
    assert os.environ[setting] == "lo"


def test_nccl_remembers_what_it_did_unless_the_user_has_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    variables = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", *files)
    for variable in variables:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    prefix = "/tmp/shoal-nccl/rank-"
    record_flights(prefix)
    assert [os.environ[variable] for variable in variables] == ["0", "1", prefix, prefix]


def test_a_store_listens_on_its_own_address_only() -> None:
    store, address = open_store("127.0.0.2")
    store.set("key", "value")
    assert reach_store(address).get("key") == b"value"
    port = address.rpartition(":")[2]
    listening = subprocess.run(
        [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.3', {port}), 1)"],
        capture_output=True,
    )
    assert listening.returncode != 0


def test_a_rank_waits_at_the_store_for_one_that_comes_as_late_as_the_start_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL asks the store of a group for what the first rank puts there; gloo has a limit of its own."""
    monkeypatch.setattr(rendezvous, "_REACH_S", 1.0)
    store, address = open_store("127.0.0.1")
    other = reach_store(address)
    join("gloo", store, (0, 1), 60.0)
    try:
        late = threading.Timer(1.5, other.set, ("group/name", "given"))
        late.start()
        assert dist.PrefixStore("group", store).get("name") == b"given"
        late.join()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))
def test_ranks_of_two_hosts_meet_though_each_host_calls_itself_by_a_loopback_address(tmp_path: Path) -> None:
    with CabledNetwork(2, tmp_path) as hosts:

        def start(rank: int, *arguments: str) -> subprocess.Popen[str]:
            host = hosts.address(1 + rank)
            prefix = ["ip", "netns", "exec", hosts.namespace(1 + rank)]
            command = [*prefix, sys.executable, "-c", RANK, str(rank), host, *arguments]
            environment = {key: value for key, value in os.environ.items() if key != SETTING}
            return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

        with start(0) as first:
            assert first.stdout is not None
            address = first.stdout.readline().strip()
            with start(1, address) as second:
                assert second.stdout is not None
                assert second.stdout.read() == "3.0\n"
            assert first.stdout.read() == "3.0\n"
    assert (first.returncode, second.returncode) == (0, 0)
