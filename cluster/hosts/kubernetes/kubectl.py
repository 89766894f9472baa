"""kubectl, as it is on this machine: objects applied, asked for and deleted; commands in pods; ports."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.hosts.provider import Tell

ANSWER_S = 60.0
_NO_ANSWER = ("Unable to connect to the server", "was refused", "i/o timeout", "no such host")


@dataclass(frozen=True)
class Kubectl:
    """One namespace of one Kubernetes cluster.

    Attributes:
        context: of kubectl's; None for its current one.
    """

    namespace: str
    context: str | None = None

    def command(self, *arguments: str) -> list[str]:
        """What runs kubectl there."""
        context = [] if self.context is None else [f"--context={self.context}"]
        return ["kubectl", *context, f"--namespace={self.namespace}", *arguments]

    def run(self, *arguments: str, given: str = "", timeout_s: float = ANSWER_S) -> str:
        """Run it to its end; what it prints.

        Raises:
            RequestError: the API server refuses it; in its words.
            ShoalError: there is no kubectl, or nobody answers.
        """
        try:
            done = subprocess.run(
                self.command(*arguments),
                input=given,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise ShoalError("there is no `kubectl` here, which `provider: kubernetes` needs") from error
        except subprocess.TimeoutExpired as error:
            raise ShoalError(f"`kubectl {arguments[0]}` did not answer within {timeout_s:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        words = "\n".join(said[-8:]) or f"exit code {done.returncode}"
        if any(each in words for each in _NO_ANSWER):
            raise ShoalError(f"Kubernetes' API server does not answer: {said[-1]}")
        raise RequestError(f"`kubectl {arguments[0]}`: {words}")

    def get(self, *arguments: str) -> dict[str, Any]:
        """An object, or a list of them.

        Raises:
            RequestError, ShoalError: as `run`.
        """
        found: dict[str, Any] = json.loads(self.run("get", *arguments, "--output=json"))
        return found

    def execute(self, pod: str, container: str, program: Sequence[str], tell: Tell) -> str:
        """Run a program in a pod; what it prints. What it says is told.

        Raises:
            ShoalError: it failed there.
        """
        process = subprocess.Popen(
            self.command("exec", pod, f"--container={container}", "--", *program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        said: list[str] = []

        def listen() -> None:
            assert process.stderr is not None, "it is piped"
            for line in process.stderr:
                if not line.startswith("command terminated with exit code"):
                    said.append(line.rstrip())
                    tell(said[-1])

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        assert process.stdout is not None, "it is piped"
        printed = process.stdout.read()
        code = process.wait()
        listener.join()
        if code != 0:
            raise ShoalError(said[-1] if said else f"a command failed in {pod} with exit code {code}")
        return printed
