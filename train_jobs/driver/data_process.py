"""A job's data is prepared in a process of its own: it can be ended, and the driver hears meanwhile."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import ShoalError
from cluster.files.storage import Storage, as_storage
from cluster.node.forked_call import ForkedCall
from cluster.node.forked_processes import ForkedProcesses, ProcessEnd
from cluster.node.node_agent import address_on_node, node_is_kept
from cluster.node.surroundings import is_own
from train_jobs.data.preparation import is_prepared, prepare_data
from train_jobs.data.tokenizing import Encode, LongWorkError, Tell, encode_here
from train_jobs.driver.data_errors import ERRORS, StoppedError
from train_jobs.driver.data_words import DataWords
from train_jobs.driver.left_behind import unless_stopped
from train_jobs.spec import env_of

_LOOK_S = 0.1


def prepare_apart(
    config: TrainJobConfig,
    directory: Storage | Path,
    stop: Callable[[], bool],
    tell: Tell = lambda _: None,
    nodes: Sequence[str] | None = None,
    *,
    hand_over: bool = False,
    notes: Storage | None = None,
) -> bool:
    """Fill a job's data directory, as prepare_data does, unless that is to stop.

    Args:
        stop: asked again and again; may take its time.
        tell: told every few seconds how far that is, or how long it has been there.
        nodes: where the job has leased workers, node id of each; None does it here.
        hand_over: it ends where it takes long here.
        notes: see prepare_data.

    Raises:
        LongWorkError: it is handed over; what was done is kept.
        NotThereError: a node does not see the documents.
        StoppedError: it was stopped; the next time goes on from where it was.
        ShoalError: the data cannot be had; a RequestError where asking again gives the same.
    """
    place = as_storage(directory)

    def look() -> bool | None:
        return prepare_data(config, place) if is_prepared(config, place) else None

    changed = unless_stopped(look, stop, "it is looked at what there is of the job's data")
    if changed is not None:
        return changed
    arguments = {
        "place": place.location,
        "config": config.model_dump_json(),
        "nodes": None if nodes is None else list(nodes),
        "hand_over": hand_over,
        "notes": None if notes is None else notes.location,
    }
    answer: dict[str, Any] = {}
    with (
        _Answers() as answers,
        ForkedCall(
            lambda: _owner(config), f"{__name__}:run_data_process", {**arguments, "answers": answers.address}
        ) as call,
    ):
        for told in answers.until(call.end.done):
            if stop():
                raise StoppedError("it is stopped while the job's data is prepared")
            if told is not None:
                answer = told
            if "said" in answer and told is not None:
                tell(answer["said"])
        if not answer or "said" in answer:
            raise ShoalError(f"the process that prepared the data ended without a word ({_how(call.end)})")
    if "rest_s" in answer:
        raise LongWorkError(answer["rest_s"])
    if "error" in answer:
        raise ERRORS[answer["kind"]](answer["error"])
    return bool(answer["changed"])


def _owner(config: TrainJobConfig) -> ForkedProcesses:
    address = address_on_node() if ray.is_initialized() else None
    return ForkedProcesses((__name__,), address, node_is_kept, env_of(config, os.environ), "data")


def _how(end: Future[ProcessEnd]) -> str:
    try:
        return str(end.result())
    except ConnectionError as error:
        return str(error)


class _Answers:
    """Where the process answers: a socket of Linux's abstract namespace."""

    def __init__(self) -> None:
        self.address = f"\0shoal-data-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._process: socket.socket | None = None

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._process is not None:
            self._process.close()

    def until(self, ended: Callable[[], bool]) -> Iterator[dict[str, Any] | None]:
        """What it answers, and None again and again, until all has come; or until it has ended in silence."""
        unread = b""
        while True:
            over = ended()  # before the last look at what it has said
            source = self._process or self._listener
            if not select.select([source], [], [], 0 if over else _LOOK_S)[0]:
                yield None
                if over:
                    return
            elif self._process is None:
                process, _ = self._listener.accept()
                if is_own(process):
                    self._process = process
            else:
                received = self._process.recv(65536)
                if not received:
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    yield json.loads(line)


def run_data_process(
    place: str, config: str, nodes: list[str] | None, hand_over: bool, notes: str | None, answers: str
) -> None:
    """Prepare a job's data, and tell whoever listens how that goes.

    Args:
        place: the data directory.
        config: the job's, as JSON.
        notes: where jobs note what they have made.
        answers: where lines of JSON go: how far it is, and what has come of it.
    """
    job = TrainJobConfig.model_validate_json(config)
    with socket.socket(socket.AF_UNIX) as told:
        told.connect(answers)
        answer: dict[str, object]
        try:
            encode = encode_here if nodes is None else _encoder(job, nodes)
            with _telling(told) as tell:
                known = None if notes is None else Storage(notes)
                answer = {"changed": prepare_data(job, Storage(place), tell, encode, hand_over, known)}
        except LongWorkError as error:
            answer = {"rest_s": error.rest_s}
        except ShoalError as error:
            kinds = [name for name, kind in ERRORS.items() if isinstance(error, kind)]
            answer = {"error": str(error), "kind": kinds[-1]}
        except Exception as error:  # noqa: BLE001  (the job has to hear of it, whatever it is)
            traceback.print_exc()
            words = f"the data cannot be prepared: {type(error).__name__}: {error}"
            answer = {"error": words, "kind": ShoalError.__name__}
        _write(told, answer)


@contextmanager
def _telling(answers: socket.socket) -> Iterator[Tell]:
    """Passes on how far the data is; a thread does so where a library works in silence."""
    words, one_at_a_time, over = DataWords(time.monotonic()), threading.Lock(), threading.Event()

    def say(said: str | None) -> None:
        if said is not None:
            _write(answers, {"said": said})

    def tell(told: str) -> None:
        with one_at_a_time:
            say(words.hear(told, time.monotonic()))

    def look() -> None:
        while not over.wait(_LOOK_S):
            with one_at_a_time:
                say(words.look(time.monotonic()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        over.set()
        thread.join()  # the answer is the last word


def _write(answers: socket.socket, answer: Mapping[str, object]) -> None:
    answers.sendall(json.dumps(answer).encode() + b"\n")


def _encoder(config: TrainJobConfig, nodes: Sequence[str]) -> Encode:
    from train_jobs.driver.tokenizing_nodes import NodesEncoder

    return NodesEncoder(config.data, nodes, config.workers.cpus, env_of(config, os.environ))
