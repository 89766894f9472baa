"""An engine that costs nothing: it continues a prompt by counting up, one token a step.

What it generates depends on the prompt and the sampling alone, so any replica gives the same answer. A prompt
can ask for things to happen: see `FakeEngine.generate`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from serve_apps.engine.protocol import (
    Delta,
    EngineConfig,
    EngineError,
    PromptError,
    QueueFullError,
    SamplingParams,
    Statistics,
    TokenLogprob,
    WeightsError,
)
from tests.serve_apps.held_text import HeldText

STEP_S = float(os.environ.get("FAKE_ENGINE_STEP_S", "0.01"))


class FakeEngine:
    """Implements serve_apps.engine.protocol.Engine without a model."""

    def __init__(self, config: EngineConfig, master_addr: str, master_port: int) -> None:
        self.config = config
        self.context_length = config.context_length or 2048
        self._running: set[str] = set()
        self._generated = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._read(config.model_path)

    def _read(self, model_path: str) -> None:
        """Take over what a model is to do: the lines of its file `behaviour`, see `make_fake_model`."""
        file = Path(model_path, "behaviour")
        lines = file.read_text().splitlines() if file.exists() else []
        behaviour = dict(line.split() for line in lines)
        self._offset = int(behaviour.get("offset", 0))
        self._fails = behaviour.get("fails", "")

    async def start(self) -> None:
        if self._fails == "start":
            raise EngineError("this model does not start")
        if self._fails in ("hang", "freeze"):
            Path(self.config.model_path, f"hangs-{os.getpid()}").touch()
        if self._fails == "hang":
            await asyncio.Event().wait()
        if self._fails == "freeze":
            time.sleep(3600)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        """Token k of the answer is `prompt_ids[-1] + 1 + k`, its text ` <id>`; that of every second one comes
        with the next. `seed` and the model's offset are added to all.

        A prompt of the single token 3 breaks the engine, of 4 finds the queue full, of 5 is refused, and of 6
        ends the process and says so in a file `killed-PID` beside the model.
        """
        probed = request_id.startswith("shoal-probe-")
        if list(prompt_ids) == [3] or self._fails == ("probes" if probed else "requests"):
            raise EngineError("broken on request")
        if list(prompt_ids) == [4] or len(self._running) >= self.config.max_batch + self.config.max_waiting:
            raise QueueFullError("full")
        if list(prompt_ids) == [5]:
            raise PromptError("this prompt is refused")
        if list(prompt_ids) == [6]:
            Path(self.config.model_path, f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._running.add(request_id)
        self._idle.clear()
        self._tell()
        offset, held = self._offset, HeldText()
        try:
            for step in range(sampling.max_tokens):
                await asyncio.sleep(STEP_S)
                token = prompt_ids[-1] + 1 + step + (sampling.seed or 0) + offset
                text = f" {token}"
                if text in sampling.stop:
                    yield Delta(held.add("", last=True), finish_reason="stop")
                    return
                self._generated += 1
                last = step == sampling.max_tokens - 1
                logprobs: tuple[TokenLogprob, ...] = ()
                if sampling.logprobs is not None:
                    top = tuple((token + i, -0.5 * (i + 1)) for i in range(sampling.logprobs))
                    logprobs = (TokenLogprob(token, -0.5, top),)
                yield Delta(held.add(text, last=last), (token,), logprobs, "length" if last else None)
        finally:
            self._running.discard(request_id)
            if not self._running:
                self._idle.set()
            self._tell()

    async def embed(self, request_id: str, prompt_ids: Sequence[int]) -> list[float]:
        return [float(token) for token in prompt_ids[:4]]

    async def load_weights(self, model_path: str) -> None:
        await self._idle.wait()
        if self._fails == "load":
            raise WeightsError("this model cannot be followed by another")
        self._read(model_path)

    def _tell(self) -> None:
        """Let tests see how many requests run: a file for each process, beside the model."""
        Path(self.config.model_path, f"running-{os.getpid()}").write_text(str(len(self._running)))

    async def abort(self, request_id: str) -> None:
        self._running.discard(request_id)

    async def park(self) -> bool:
        if self._fails == "park":
            raise EngineError("this model cannot be parked")
        return self._fails != "stay"

    async def wake(self) -> None:
        if self._fails == "wake":
            raise EngineError("this model is another one now")
        if self._fails == "sleep":
            await asyncio.Event().wait()
        if self._fails == "differ":
            self._offset += 1

    def chat(self, tools: str | None, reasoning: str | None) -> None:
        """Left to the replica; see `Engine.chat`."""

    def statistics(self) -> Statistics:
        return Statistics(running=len(self._running), generated_tokens=self._generated)

    def check(self) -> None:
        pass

    async def stop(self) -> None:
        self._running.clear()


def follow(config: EngineConfig, rank: int, master_addr: str, master_port: int) -> None:
    """A rank beside rank 0 that says so, and does nothing until its process is ended."""
    print(f"rank {rank} follows", file=sys.stderr, flush=True)
    while True:
        time.sleep(3600)


def make_fake_model(directory: Path, **behaviour: object) -> Path:
    """A model directory for this engine.

    Args:
        behaviour: `offset`, which is added to every token; `fails`: `start`, `hang` (its start does not end;
            a file `hangs-PID` beside the model says so), `freeze` (as that, and the event loop stands still),
            `probes`, `requests` (all but probes), `load` (other weights after it), `park`, `stay` (it is not
            parked), `wake`, `sleep` (it does not wake, and says nothing), `differ` (it wakes as another one).
    """
    import numpy
    from safetensors.numpy import save_file

    from tests.serve_apps.tiny_model import make_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory)
    save_file({"weight": numpy.zeros((4, 4), numpy.float32)}, str(directory / "model.safetensors"))
    (directory / "config.json").write_text("{}")
    (directory / "behaviour").write_text("".join(f"{key} {value}\n" for key, value in behaviour.items()))
    return directory
