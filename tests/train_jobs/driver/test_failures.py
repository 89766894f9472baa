"""Judging failures: the cause among what the ranks say, and its class."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.errors import RequestError
from cluster.files.backend import StorageError
from train_jobs.driver.failures import SCRIPT_MEMORY_ADVICE, FailureClass, class_of, classify
from train_jobs.errors import CheckpointError, LossError, ScriptError, bases_of, last_exception
from train_jobs.group.outcome import RankFailure
from train_jobs.rank.process import is_collective

NODES = ["n1", "n2"]
NAMES = {"n1": "worker-1", "n2": "worker-2"}


def peer_lost(rank: int) -> RankFailure:
    return RankFailure(rank, 7, "RuntimeError", "gloo: Connection closed by peer", "", collective=True)


def test_the_dead_process_is_the_cause_and_not_the_rank_that_lost_it() -> None:
    dead = RankFailure(1, None, "ActorDiedError", "killed", "", died=True)
    failure = classify([peer_lost(0), dead], NODES, NAMES.keys(), NAMES)
    found = (failure.failure_class, failure.rank, failure.node, failure.node_id)
    assert found == (FailureClass.WORKER, 1, "worker-2", "n2")


def test_a_dead_process_that_is_of_no_rank_is_the_groups() -> None:
    dead = RankFailure(None, None, "ActorDiedError", "killed", "", died=True)
    failure = classify([dead], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.rank, failure.node) == (FailureClass.WORKER, None, None)
    assert failure.reason == "the process of the group ended: killed"


def test_a_script_that_lost_its_peer_made_no_mistake() -> None:
    lost = ScriptError(
        "the script ended with exit code 1", "RuntimeError: [../gloo/transport/tcp/pair.cc:547]"
    )
    assert is_collective(lost)
    assert not is_collective(ScriptError("the script ended with exit code 1", "KeyError: 'gloo'"))
    assert is_collective(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    assert not is_collective(KeyError("Connection closed by peer"))


def test_the_users_exception_is_the_cause_and_not_the_rank_that_lost_its_peer() -> None:
    mistake = RankFailure(1, 3, "KeyError", "'x'", "Traceback …")
    failure = classify([peer_lost(0), mistake], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.step, failure.trace) == (FailureClass.CODE, 3, "Traceback …")


def test_a_wrong_request_is_told_in_its_own_words() -> None:
    wrong = RankFailure(1, 0, "RequestError", "the tokenizer knows more tokens", "Traceback …")
    failure = classify([peer_lost(0), wrong], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.reason) == (
        FailureClass.REQUEST,
        "the tokenizer knows more tokens",
    )


def test_checkpoints_that_cannot_be_loaded_are_told_in_their_own_words() -> None:
    none_left = RankFailure(0, 0, "CheckpointError", "all 2 checkpoints of lm are damaged", "Traceback …")
    failure = classify([none_left, peer_lost(1)], NODES, NAMES.keys(), NAMES)
    assert failure.failure_class == FailureClass.CHECKPOINT
    assert failure.reason == "all 2 checkpoints of lm are damaged"
    assert not failure.by_node


def test_a_node_that_is_gone_explains_everything() -> None:
    failure = classify([peer_lost(0)], NODES, {"n1"}, NAMES)
    found = (failure.failure_class, failure.node, failure.node_id, failure.rank)
    assert found == (FailureClass.NODE, "worker-2", "n2", 1)


def test_a_node_that_is_taken_back_is_not_the_groups_fault() -> None:
    said = "Training was interrupted by node preemption (preempted_ranks=[0])."
    failure = classify([RankFailure(None, None, "PreemptionError", said, "")], NODES, NAMES.keys(), NAMES)
    assert failure.failure_class is FailureClass.NODE


def test_a_collective_that_times_out_is_a_hang() -> None:
    late = RankFailure(0, 2, "RuntimeError", "gloo: Timed out waiting 1000ms for recv", "", collective=True)
    assert classify([late], NODES, NAMES.keys(), NAMES).failure_class is FailureClass.HANG


def test_a_lost_peer_is_known_by_its_words_where_the_rank_did_not_know_it() -> None:
    for kind, message in (("RuntimeError", "Socket Timeout"), ("DistStoreError", "wait timeout")):
        failure = classify([RankFailure(0, 2, kind, message, "")], NODES, NAMES.keys(), NAMES)
        assert failure.failure_class is FailureClass.HANG


def test_a_group_that_could_not_start_says_why() -> None:
    failure = classify(
        [RankFailure(None, None, "ControllerError", "no resources", "")], NODES, NAMES.keys(), NAMES
    )
    assert failure.failure_class is FailureClass.START
    assert "no resources" in failure.reason


def test_a_rank_that_leaves_by_itself_is_no_lost_worker() -> None:
    left = RankFailure(1, None, "RankDied", "exit code 0", "", died=True)
    failure = classify([peer_lost(0), left], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.rank, failure.node) == (FailureClass.CODE, 1, "worker-2")
    assert "exit code 0, before it was done" in failure.reason
    killed = RankFailure(1, None, "RankDied", "killed by SIGKILL", "", died=True)
    assert classify([killed], NODES, NAMES.keys(), NAMES).failure_class is FailureClass.WORKER


# -- exceptions ----------------------------------------------------------------------------------------------


def raised(code: Callable[[], object]) -> Exception:
    """What some code raises."""
    try:
        code()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("it raised nothing")


def wants_all_memory() -> object:
    return torch.empty(10**15)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (raised(lambda: {}["x"]), "code"),
        (raised(lambda: Path("/no/such/file").read_text()), "code"),
        (raised(lambda: Path("/proc").read_text()), "code"),
        (raised(lambda: 1 / 0), "code"),
        (raised(lambda: torch.ones(2) @ torch.ones(3)), "code"),
        (raised(wants_all_memory), "memory"),
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "memory"),
        (RuntimeError("CUDA error: out of memory"), "memory"),
        (ValueError("the vocabulary is out of memory range"), "code"),
        (OSError(5, "Input/output error"), "transient"),
        (OSError(28, "No space left on device"), "transient"),
        (OSError(36, "File name too long", "x" * 300), "code"),
        # What transformers says of a model that is not there.
        (OSError("lm is not a local folder and is not a valid model identifier"), "code"),
        (OSError("When reading information for key 'k': AWS Error NETWORK_CONNECTION"), "transient"),
        (ConnectionResetError(104, "Connection reset by peer"), "transient"),
        (type("Refused", (ConnectionRefusedError,), {})(111, "Connection refused"), "transient"),
        (type("MyError", (ValueError,), {})("no"), "code"),
        (type("NoModel", (FileNotFoundError,), {})(2, "No such file"), "code"),
        (type("OutOfSpace", (OSError,), {})(28, "No space left on device"), "transient"),
        (type("TooMuch", (torch.OutOfMemoryError,), {})("CUDA out of memory."), "memory"),
        (type("HfHubHTTPError", (OSError,), {})("503 Server Error: Service Unavailable"), "transient"),
        (type("HfHubHTTPError", (OSError,), {})("404 Client Error: Not Found for url"), "code"),
        (type("HTTPError", (OSError,), {})("429 Client Error: Too Many Requests"), "transient"),
        (
            type("RepositoryNotFoundError", (type("HfHubHTTPError", (OSError,), {}),), {})(
                "no such repository"
            ),
            "code",
        ),
        (TimeoutError("timed out"), "transient"),
        (PermissionError(13, "Permission denied"), "code"),
        (StorageError("s3://b/k does not answer"), "transient"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "node"),
        (RuntimeError("CUDA error: device-side assert triggered"), "code"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
        (RuntimeError("CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), "device"),
        (LossError("the loss is nan in step 2"), "loss"),
        (CheckpointError("all 2 checkpoints of lm are damaged"), "checkpoint"),
        (RequestError("no"), "request"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:40],
)
def test_only_what_does_not_come_from_the_program_is_more_than_a_mistake(
    error: Exception, expected: str
) -> None:
    assert class_of(type(error).__name__, str(error), bases_of(error)) == expected


def test_a_rank_without_memory_is_named_with_its_node_and_what_takes_less() -> None:
    full = RankFailure(1, 3, "OutOfMemoryError", "CUDA out of memory. Tried 2 GiB.\nGPU 0 has", "Traceback …")
    failure = classify([peer_lost(0), full], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.rank, failure.node) == (FailureClass.MEMORY, 1, "worker-2")
    assert failure.reason.startswith(
        "rank 1 on worker-2 ran out of memory (CUDA out of memory. Tried 2 GiB.): a smaller batch.micro, "
        "parallel.activation_checkpointing"
    )


@pytest.mark.parametrize(
    ("failures", "by_node"),
    [
        ([peer_lost(0), RankFailure(1, None, "ActorDiedError", "killed", "", died=True)], True),
        ([peer_lost(0), RankFailure(1, 3, "OSError", "[Errno 5] Input/output error", "")], True),
        ([peer_lost(0), RankFailure(1, 3, "RuntimeError", "CUDA error: uncorrectable ECC error", "")], True),
        ([RankFailure(rank, 3, "OSError", "[Errno 5] Input/output error", "") for rank in (0, 1)], False),
        ([RankFailure(rank, None, "ActorDiedError", "", "", died=True) for rank in (0, 1)], False),
        ([peer_lost(0), RankFailure(1, 3, "KeyError", "'x'", "")], False),
        ([peer_lost(0), RankFailure(1, 3, "OutOfMemoryError", "CUDA out of memory", "")], False),
        ([peer_lost(0), peer_lost(1)], False),
        ([RankFailure(None, None, "ActorDiedError", "killed", "", died=True)], False),
    ],
)
def test_only_what_hits_one_node_and_is_no_mistake_of_the_program_speaks_against_the_node(
    failures: list[RankFailure], by_node: bool
) -> None:
    assert classify(failures, NODES, NAMES.keys(), NAMES).by_node is by_node


def test_the_loss_of_a_node_speaks_against_it() -> None:
    assert classify([peer_lost(0)], NODES, {"n1"}, NAMES).by_node


RAY_MONITOR = (
    "A worker health check failed.\n1 worker(s) were killed due to the node running low on memory. Memory on"
    " the node was 30.1GB used / 31.0GB limit"
)
RAY_ANY_SIGKILL = (
    "The actor died unexpectedly before finishing this task.\nThe actor is dead because its worker process"
    " has died. Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
    " There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high"
    " memory usage. (2) ray stop --force is called."
)


def test_a_process_that_rays_memory_monitor_killed_is_told_from_any_other_sigkill() -> None:
    for detail, expected in ((RAY_MONITOR, FailureClass.MEMORY), (RAY_ANY_SIGKILL, FailureClass.WORKER)):
        dead = RankFailure(1, None, "WorkerHealthCheckFailedError", detail.split("\n")[0], detail, died=True)
        assert classify([peer_lost(0), dead], NODES, NAMES.keys(), NAMES).failure_class is expected


# -- scripts -------------------------------------------------------------------------------------------------


def script(code: int, output: str) -> RankFailure:
    message = "the script was ended by SIGKILL" if code < 0 else f"the script ended with exit code {code}"
    return RankFailure(0, 0, "ScriptError", message, output)


def printed(error: Exception, prefix: str = "") -> str:
    """What Python, or torch with its prefix, prints of an exception after other output."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(["step 1, loss 2.5", *(prefix + line for line in lines), ""])


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_a_script_is_judged_by_the_exception_that_ended_it(prefix: str) -> None:
    for error, expected in (
        (raised(lambda: {}["x"]), FailureClass.CODE),
        (raised(wants_all_memory), FailureClass.MEMORY),
        (raised(lambda: chained(KeyError("x"), ConnectionError("gone"))), FailureClass.TRANSIENT),
        (raised(lambda: chained(ConnectionError("gone"), KeyError("x"))), FailureClass.CODE),
    ):
        failure = classify([script(1, printed(error, prefix))], NODES, NAMES.keys(), NAMES)
        assert failure.failure_class is expected, error


def chained(first: Exception, then: Exception) -> None:
    try:
        raise first
    except Exception:  # noqa: BLE001
        raise then  # noqa: B904


def test_a_script_that_was_killed_is_a_lost_worker_and_one_without_a_traceback_a_mistake() -> None:
    killed = classify([script(-9, printed(KeyError("x")))], NODES, NAMES.keys(), NAMES)
    assert (killed.failure_class, killed.rank) == (FailureClass.WORKER, 0)
    left = classify([script(3, "usage: train.py [-h]\n")], NODES, NAMES.keys(), NAMES)
    assert left.failure_class is FailureClass.CODE
    assert "exit code 3" in left.reason


def test_the_last_exception_of_an_output_has_its_module_taken_off() -> None:
    output = "Traceback (most recent call last):\n  File 'a', line 1\n    x\na.b.CError: why: so\nmore\n"
    assert last_exception(output) == ("CError", "why: so")
    assert last_exception("Traceback (most recent call last):\n  cut off") is None
    assert last_exception("KeyError: 'x'") is None


def test_of_ranks_that_hang_the_one_that_waits_for_no_other_is_named() -> None:
    waits = RankFailure(0, None, "Hang", "has done nothing (sleeping)", "", hung=True, collective=True)
    hangs = RankFailure(1, None, "Hang", "has done nothing (sleeping)", "", hung=True)
    failure = classify([waits, hangs], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.rank) == (FailureClass.HANG, 1)
    alone = classify([waits], NODES, NAMES.keys(), NAMES)
    assert (alone.failure_class, alone.rank) == (FailureClass.HANG, 0)


@pytest.mark.parametrize(
    ("begun", "stands_elsewhere", "named"),
    [
        ((7, 6, 7), (), 1),  # they all stand alike: on a GPU, or in the backward pass
        ((7, 6, 7), (2,), 1),  # one was seen on its way from one collective to the next
        ((7, 7, 7), (2,), 2),
        ((7, None, 6), (1,), 1),
        ((7, None, 6), (), 0),
    ],
)
def test_of_ranks_that_hang_the_one_that_has_begun_fewer_collectives_is_named(
    begun: tuple[int | None, ...], stands_elsewhere: tuple[int, ...], named: int
) -> None:
    hung = [
        RankFailure(
            rank, None, "Hang", "", "", hung=True, collective=rank not in stands_elsewhere, collectives=count
        )
        for rank, count in enumerate(begun)
    ]
    nodes = ["n1"] * len(hung)
    assert classify(hung, nodes, {"n1"}, {}).rank == named


def test_a_script_that_lacks_memory_is_advised_what_a_script_can_do() -> None:
    failures = [script(1, printed(raised(wants_all_memory)))]
    said = classify(failures, NODES, NAMES.keys(), NAMES, SCRIPT_MEMORY_ADVICE).reason
    assert "smaller batches" in said
    assert "batch.micro" not in said
