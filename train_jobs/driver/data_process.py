"""A job's data is prepared in a process of its own: it can be ended, and the driver hears meanwhile.

`python -m train_jobs.driver.data_process ANSWER PLACE SYS_PATH NODES HAND_OVER` is that process; it reads
the job's config. Lines of JSON go to the file descriptor ANSWER: how far it is, and what has come of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import ShoalError
from cluster.files.storage import Storage, as_storage
from train_jobs.data.preparation import is_prepared, prepare_data
from train_jobs.data.tokenizing import Encode, LongWorkError, Tell, encode_here
from train_jobs.driver.data_errors import ERRORS, StoppedError
from train_jobs.driver.data_words import DataWords
from train_jobs.driver.left_behind import unless_stopped
from train_jobs.spec import env_of

_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


def prepare_apart(
    config: TrainJobConfig,
    directory: Storage | Path,
    stop: Callable[[], bool],
    tell: Tell = lambda _: None,
    nodes: Sequence[str] | None = None,
    *,
    hand_over: bool = False,
) -> bool:
    """Fill a job's data directory, as prepare_data does, unless that is to stop.

    Args:
        stop: asked again and again; may take its time.
        tell: told every few seconds how far that is, or how long it has been there.
        nodes: where the job has leased workers, node id of each; None does it here.
        hand_over: it ends where it takes long here.

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
    ours, theirs = os.pipe()
    program = [sys.executable, "-m", "train_jobs.driver.data_process", str(theirs), place.location]
    program += [json.dumps(sys.path), json.dumps(nodes), json.dumps(hand_over)]
    with (
        open(ours, "rb", buffering=0) as answers,
        subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            start_new_session=True,
            env={**os.environ, **env_of(config, os.environ)},
        ) as process,
    ):
        os.close(theirs)
        assert process.stdin is not None
        try:
            process.stdin.write(config.model_dump_json().encode())
            process.stdin.close()
            answer: dict[str, Any] = {}
            unread = b""
            while True:
                if stop():
                    raise StoppedError("it is stopped while the job's data is prepared")
                if not select.select([answers], [], [], _LOOK_S)[0]:
                    continue
                if not (received := answers.read(65536)):
                    break
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    answer = json.loads(line)
                    if "said" in answer:
                        tell(answer["said"])
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            raise
    if not answer or "said" in answer:
        code = process.returncode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise ShoalError(f"the process that prepared the data ended without a word ({how})")
    if "rest_s" in answer:
        raise LongWorkError(answer["rest_s"])
    if "error" in answer:
        raise ERRORS[answer["kind"]](answer["error"])
    return bool(answer["changed"])


def main() -> None:
    # Whoever asked may be killed; nobody would know of this process then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers, place = int(sys.argv[1]), Storage(sys.argv[2])
    sys.path[:] = json.loads(sys.argv[3])
    nodes: list[str] | None = json.loads(sys.argv[4])
    config = TrainJobConfig.model_validate_json(sys.stdin.read())
    answer: dict[str, object]
    try:
        encode = encode_here if nodes is None else _encoder(config, nodes)
        with _telling(answers) as tell:
            answer = {"changed": prepare_data(config, place, tell, encode, json.loads(sys.argv[5]))}
    except LongWorkError as error:
        answer = {"rest_s": error.rest_s}
    except ShoalError as error:
        kinds = [name for name, kind in ERRORS.items() if isinstance(error, kind)]
        answer = {"error": str(error), "kind": kinds[-1]}
    except Exception as error:  # noqa: BLE001  (the job has to hear of it, whatever it is)
        traceback.print_exc()
        words = f"the data cannot be prepared: {type(error).__name__}: {error}"
        answer = {"error": words, "kind": ShoalError.__name__}
    _write(answers, answer)


@contextmanager
def _telling(answers: int) -> Iterator[Tell]:
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


def _write(answers: int, answer: Mapping[str, object]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


def _encoder(config: TrainJobConfig, nodes: Sequence[str]) -> Encode:
    from train_jobs.driver.tokenizing_nodes import NodesEncoder

    return NodesEncoder(config.data, nodes, config.workers.cpus, env_of(config, os.environ))


if __name__ == "__main__":
    main()
