"""What went wrong with a group: the cause among what its ranks say, and its class. Pure logic."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.errors import RequestError
from cluster.wording import first_line
from train_jobs.errors import CheckpointError, LossError, ScriptError, last_exception
from train_jobs.group.outcome import RankFailure

MEMORY_ADVICE = (
    "a smaller batch.micro, parallel.activation_checkpointing: full, or a sharding strategy on more workers"
    " takes less"
)
SCRIPT_MEMORY_ADVICE = (
    "smaller batches (more steps of accumulation), checkpointed activations, or weights and optimizer state"
    " in shards (FSDP, ZeRO) take less; the script decides that"
)


class FailureClass(StrEnum):
    """Who or what failed."""

    WORKER = "worker"
    """A worker process ended."""
    NODE = "node"
    """A node went away, with its workers, or an accelerator of it failed."""
    HANG = "hang"
    """A rank did not get on, or a collective did not return, within the hang timeout."""
    MEMORY = "memory"
    """A rank ran out of memory."""
    DEVICE = "device"
    """An accelerator ended a kernel, which may be its own fault or the program's."""
    TRANSIENT = "transient"
    """An exception that may pass: a file system, a connection or a service did not answer."""
    CODE = "code"
    """Any other exception in the code that is trained with."""
    LOSS = "loss"
    """The loss or its gradient is not a number."""
    CHECKPOINT = "checkpoint"
    """Checkpoints cannot be saved, or none of those that were saved can be loaded."""
    REQUEST = "request"
    """What the job asks for cannot be done, as a rank saw."""
    START = "start"
    """The group could not be started, or Ray Train's controller failed."""


_PLAIN = (FailureClass.REQUEST, FailureClass.LOSS, FailureClass.CHECKPOINT)
"""Told in sentences of ours."""
_MAY_BE_THE_NODES = (
    FailureClass.WORKER,
    FailureClass.NODE,
    FailureClass.DEVICE,
    FailureClass.TRANSIENT,
)


@dataclass(frozen=True)
class Failure:
    """The failure of a group, as it is logged and judged.

    Attributes:
        node, node_id: name and id of the node that it happened on, where that is known.
        by_node: it speaks against that node: the node is gone or its accelerator broken, or ranks there ended
            or met an error that may pass, and no rank on another node did.
    """

    failure_class: FailureClass
    reason: str
    rank: int | None = None
    node: str | None = None
    node_id: str | None = None
    step: int | None = None
    trace: str = ""
    by_node: bool = False


def classify(
    failures: Sequence[RankFailure],
    rank_nodes: Sequence[str],
    alive: Collection[str],
    names: Mapping[str, str],
    memory_advice: str = MEMORY_ADVICE,
) -> Failure:
    """Find the cause among what the ranks of one group reported.

    A rank that loses its peer fails too, in a collective; it is only believed where nothing else failed.

    Args:
        rank_nodes: node id of each rank.
        alive: ids of the nodes that are alive now.
        names: names of nodes by id.
        memory_advice: what takes less memory.
    """
    gone = [rank for rank, node in enumerate(rank_nodes) if node not in alive]
    if gone:
        node = rank_nodes[gone[0]]
        name = names.get(node, node)
        reason = f"node {name} went away"
        return Failure(FailureClass.NODE, reason, rank=gone[0], node=name, node_id=node, by_node=True)

    def found(failure: RankFailure, failure_class: FailureClass, reason: str) -> Failure:
        node = rank_nodes[failure.rank] if failure.rank is not None else None
        name = None if node is None else names.get(node, node)
        if failure_class is FailureClass.MEMORY:
            where = "the group" if failure.rank is None else f"rank {failure.rank} on {name}"
            reason = f"{where} ran out of memory ({first_line(failure.message)}): {memory_advice}"
        by_node = node is not None and failure_class in _MAY_BE_THE_NODES and places == {node}
        return Failure(failure_class, reason, failure.rank, name, node, failure.step, failure.trace, by_node)

    failures = [_as_it_is(failure) for failure in failures]
    # Where anything happened; a rank that lost its peer only tells of it.
    places = {
        None if failure.rank is None else rank_nodes[failure.rank]
        for failure in failures
        if not failure.collective
    }
    hung = _which_hangs([each for each in failures if each.hung])
    if hung is not None:  # those that wait for the one that hangs do not get on either
        return found(hung, FailureClass.HANG, f"rank {hung.rank} {hung.message}")
    for failure in failures:
        if not failure.died and not failure.collective and failure.rank is not None:
            failure_class = class_of(failure.kind, failure.message, failure.bases)
            plain = failure_class in _PLAIN
            reason = failure.message if plain else f"{failure.kind}: {failure.message}"
            return found(failure, failure_class, reason + _advice(failure.message))
    for failure in failures:
        if failure.died:
            whose = "the group" if failure.rank is None else f"rank {failure.rank}"
            reason = f"the process of {whose} ended: {failure.message}"
            if failure.message == "exit code 0":
                reason += ", before it was done: something in it leaves the program (sys.exit, os._exit)"
                return found(failure, FailureClass.CODE, reason)
            words = f"{failure.message}\n{failure.trace}"
            if any(sign in words for sign in _MEMORY_MONITOR) or failure.kind in _MEMORY_KINDS:
                return found(failure, FailureClass.MEMORY, reason)
            return found(failure, FailureClass.WORKER, reason)
    for failure in failures:
        if failure.collective:
            if "timed out" in failure.message.lower() or "timeout" in failure.message.lower():
                return found(failure, FailureClass.HANG, f"a collective did not return: {failure.message}")
            return found(
                failure, FailureClass.WORKER, f"rank {failure.rank} lost another rank: {failure.message}"
            )
    first = (
        failures[0]
        if failures
        else RankFailure(None, None, "Unknown", "the group ended without a reason", "")
    )
    preempted = first.kind == "PreemptionError"  # Ray Train's word for a node that is taken back
    failure_class = FailureClass.NODE if preempted else FailureClass.START
    return Failure(failure_class, f"{first.kind}: {first.message}", trace=first.trace)


def _which_hangs(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The rank that the others wait for, of those that do not get on.

    All ranks of a group begin the same collectives: it has begun fewer than they. Where that does not tell
    (all have begun the same, or somebody did not count), where they stand does: in a collective, or not. In
    the backward pass, and where a GPU's result is waited for, all stand alike.
    """
    begun = {each.collectives for each in failures}
    if None not in begun and len(begun) > 1:
        return min(failures, key=lambda each: (each.collectives, each.collective))
    return min(failures, key=lambda each: each.collective, default=None)


# -- exceptions ---------------------------------------------------------------------------------------------

_MEMORY_KINDS = ("MemoryError", "OutOfMemoryError")
"""Python's, and torch's and Ray's."""
_MEMORY_WORDS = (
    "out of memory",  # CUDA's driver and its allocator, cuDNN, NCCL
    "DefaultCPUAllocator: can't allocate memory",
    "Cannot allocate memory",  # ENOMEM
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_MEMORY_MONITOR = ("running low on memory", "NODE_OUT_OF_MEMORY")
"""What Ray says of a process that its own memory monitor has killed. What it says of any other SIGKILL names
"OOM" too, as one of several guesses, and tells nothing."""

_DEVICE_WORDS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "no CUDA-capable device is detected",
    "CUDA-capable device(s) is/are busy or unavailable",
    "hardware stack error",
    "GPU has fallen off the bus",
    "GPU is lost",
)
"""CUDA's words for a device that is broken."""

_KERNEL_WORDS = (
    "unspecified launch failure",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "invalid program counter",
    "launch timed out and was terminated",
    "CUDA error: unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)
"""CUDA's words for a kernel that ended badly: a mistake in the program, or the first sign of a device that
breaks. An assertion on the device is the program's."""

_LOST_PEER_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER_WORDS = ("Socket Timeout", "Broken pipe", "Timed out waiting", "NCCL communicator was aborted")
"""What torch.distributed raises, beside what a rank itself knows for it, where another rank went away."""

_TRANSIENT_KINDS = frozenset(
    {
        "BlockingIOError",
        "InterruptedError",
        "TimeoutError",
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "gaierror",
        "herror",
        "timeout",
        "RemoteDisconnected",
        "IncompleteRead",
        "URLError",
        "HTTPError",
        "SSLError",
        "SSLEOFError",
        "ConnectTimeout",
        "ReadTimeout",
        "ChunkedEncodingError",
        "ProxyError",
        "ProtocolError",
        "NewConnectionError",
        "MaxRetryError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ConnectError",
        "ReadError",
        "RemoteProtocolError",
        "ClientConnectionError",
        "ClientConnectorError",
        "ServerDisconnectedError",
        "ServerTimeoutError",
        "EndpointConnectionError",
        "ConnectionClosedError",
        "HTTPClientError",
        "HfHubHTTPError",
        "GetTimeoutError",
        "RayActorError",
        "ActorDiedError",
        "ActorUnavailableError",
        "RaySystemError",
        "RpcError",
        "NodeDiedError",
        "WorkerCrashedError",
        "LocalRayletDiedError",
        "OwnerDiedError",
        "ObjectLostError",
        "ObjectFetchTimedOutError",
        "ObjectStoreFullError",
        "OutOfDiskError",
        "StorageError",
    }
)
"""Names of exceptions of Python; of requests, urllib3, httpx, aiohttp, botocore and huggingface_hub; of Ray,
in a rank that asked an actor or for an object; ours."""

_CLEAR_KINDS = frozenset(
    {
        "FileNotFoundError",
        "FileExistsError",
        "PermissionError",
        "IsADirectoryError",
        "NotADirectoryError",
        "ProcessLookupError",
        "ChildProcessError",
        "UnsupportedOperation",
        "UnidentifiedImageError",
        "SSLCertVerificationError",
        "InvalidURL",
        "MissingSchema",
        "InvalidSchema",
        "JSONDecodeError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "EntryNotFoundError",
        "LocalEntryNotFoundError",
        "GatedRepoError",
        "DisabledRepoError",
        "BadRequestError",
        "HFValidationError",
    }
)
"""Those that derive from one of these, or from OSError: the answer was clear, and will be the same again."""

_ERRNO = re.compile(r"\[Errno (\d+)\]")
_CLEAR_ERRNOS = frozenset({errno.E2BIG, errno.ENOEXEC, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP})
_AWAY_WORDS = (
    "AWS Error",
    "Google Cloud",
    "curl",
    "Curl",
    "timed out",
    "Timeout",
    "onnection",
    "HTTP status",
)
"""How pyarrow's clients of object stores, which give no errno, say that nobody answered."""
_CLIENTS_FAULT = re.compile(r"\b4(?!08|29)\d\d Client Error")


def class_of(kind: str, message: str, bases: Sequence[str] = ()) -> FailureClass:
    """The class of an exception that a rank raised.

    What the user's code raises ends the job at once: the same program on the same samples raises it again.
    Some exceptions do not come from the program but from what is around it, and may pass:

    - the operating system, the network or a service did not answer (OSError with a number, the time-outs and
      connection errors of the usual clients, our StorageError, Ray's own): transient. What was not found,
      is not allowed or is in the way is none of these, nor is an OSError that somebody raised with words of
      their own (as transformers does of a model that is not there);
    - memory ran out: a class of its own;
    - an accelerator is broken, in CUDA's words: the node's. One that ended a kernel may be, or not: a class
      of its own.

    An exception travels by the names of its class and of those that it derives from; the nearest that is
    known counts.

    Args:
        kind: name of the exception's class, without its module.
        bases: names of the classes that it derives from, the nearest first.
    """
    for name in (kind, *bases):
        if (known := _class_of(name, message)) is not None:
            return known
    return FailureClass.CODE


def _class_of(name: str, message: str) -> FailureClass | None:
    """What the name of one class tells; None where it tells nothing."""
    ours = {
        RequestError.__name__: FailureClass.REQUEST,
        LossError.__name__: FailureClass.LOSS,
        CheckpointError.__name__: FailureClass.CHECKPOINT,
    }
    if name in ours:
        return ours[name]
    if name in _MEMORY_KINDS:
        return FailureClass.MEMORY
    if name in ("RuntimeError", "AcceleratorError", "OSError"):
        if any(words in message for words in _MEMORY_WORDS):
            return FailureClass.MEMORY
        if name != "OSError":
            if any(words in message for words in _DEVICE_WORDS):
                return FailureClass.NODE
            return FailureClass.DEVICE if any(words in message for words in _KERNEL_WORDS) else None
    if name in _CLEAR_KINDS or _CLIENTS_FAULT.search(message):
        return FailureClass.CODE
    if name == "OSError":
        number = _ERRNO.match(message)
        if number is None:
            away = any(words in message for words in _AWAY_WORDS)
        else:
            away = int(number[1]) not in _CLEAR_ERRNOS
        return FailureClass.TRANSIENT if away else FailureClass.CODE
    return FailureClass.TRANSIENT if name in _TRANSIENT_KINDS else None


def _as_it_is(failure: RankFailure) -> RankFailure:
    """A failure as its words tell it: of a script, its end, or the exception that its output ends with."""
    if failure.kind == ScriptError.__name__ and not failure.collective:
        if failure.message.startswith("the script was ended by "):
            return replace(failure, died=True)
        found = last_exception(failure.trace)
        if found is not None:
            failure = replace(failure, kind=found[0], message=found[1])
    lost = failure.kind in _LOST_PEER_KINDS or (
        failure.kind == "RuntimeError" and any(words in failure.message for words in _LOST_PEER_WORDS)
    )
    return replace(failure, collective=True) if lost else failure


def _advice(message: str) -> str:
    """What to change in the config where a library's message names an argument of its own."""
    if "find_unused_parameters=True" in message:
        return "\n(here: parallel.ddp.find_unused_parameters: true)"
    return ""
