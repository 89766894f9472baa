"""A job's data is prepared in a process of its own: it can be ended, and the driver hears meanwhile.

`python -m train_jobs.driver.data_process ANSWER DIRECTORY SYS_PATH` is that process; the job's config is what
it reads. Lines of JSON go to the file descriptor ANSWER: how far it is, and at last what has come of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from threading import Event
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from train_jobs.data import preparation
from train_jobs.data.preparation import is_prepared, prepare_data
from train_jobs.data.tokens import Tell

_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


class StoppedError(ShoalError):
    """The job was asked to stop."""


def prepare_apart(config: TrainJobConfig, directory: Path, stop: Event, tell: Tell = lambda _: None) -> bool:
    """Fill a job's data directory, as prepare_data does, unless that is to stop.

    Args:
        tell: told every few seconds how far that is.

    Raises:
        StoppedError: it was stopped; work that was not complete is done again the next time.
        ShoalError: the data cannot be had; a RequestError where asking again gives the same.
    """
    if is_prepared(config, directory):
        return prepare_data(config, directory)  # a look at what is there
    ours, theirs = os.pipe()
    program = [sys.executable, "-m", "train_jobs.driver.data_process", str(theirs), str(directory)]
    with (
        open(ours, "rb", buffering=0) as answers,
        subprocess.Popen(
            [*program, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            start_new_session=True,
            env={**os.environ, **{name: value for name, value in config.env.items() if value is not None}},
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
                if stop.is_set():
                    raise StoppedError("the job is stopped while its data is prepared")
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
    if "error" in answer:
        raise (RequestError if answer["request"] else ShoalError)(answer["error"])
    return bool(answer["changed"])


def main() -> None:
    # Whoever asked may be killed; nobody would know of this process then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers, directory = int(sys.argv[1]), Path(sys.argv[2])
    sys.path[:] = json.loads(sys.argv[3])
    config = TrainJobConfig.model_validate_json(sys.stdin.read())
    answer: dict[str, object]
    next_word = time.monotonic() + preparation.FIRST_WORD_S

    def tell(words: str) -> None:
        nonlocal next_word
        if time.monotonic() >= next_word:
            next_word = time.monotonic() + preparation.WORD_S
            os.write(answers, json.dumps({"said": words}).encode() + b"\n")

    try:
        answer = {"changed": prepare_data(config, directory, tell)}
    except ShoalError as error:
        answer = {"error": str(error), "request": isinstance(error, RequestError)}
    except Exception as error:  # noqa: BLE001  (the job has to hear of it, whatever it is)
        traceback.print_exc()
        answer = {"error": f"the data cannot be prepared: {type(error).__name__}: {error}", "request": False}
    os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
