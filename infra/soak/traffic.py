"""Clients that keep a changing number of streamed requests in flight, and note what came of each."""

from __future__ import annotations

import json
import threading
import time

import httpx

from infra.soak.oracle import Asked

REQUEST_TIMEOUT_S = 120.0
_RETRY_S = 0.5


class Traffic:
    """From the start to the end of a `with`.

    Args:
        base_url: an OpenAI base URL.
        app: the request's `model`.
    """

    def __init__(self, base_url: str, app: str, prompt: str, max_tokens: int) -> None:
        self.url = f"{base_url}/completions"
        self.body = {"model": app, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self.asked: list[Asked] = []
        self._wanted = 0
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def set(self, clients: int) -> None:
        """Have so many requests in flight; those that are too many end first."""
        self._wanted = clients
        while len(self._threads) < clients:
            index = len(self._threads)
            thread = threading.Thread(target=self._ask, args=(index,), name=f"client {index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _ask(self, index: int) -> None:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S) as http:
            while not self._ended.is_set():
                if index >= self._wanted:
                    self._ended.wait(_RETRY_S)
                    continue
                asked = self._ask_once(http, index)
                self.asked.append(asked)
                if asked.outcome == "refused":
                    self._ended.wait(_RETRY_S)

    def _ask_once(self, http: httpx.Client, index: int) -> Asked:
        began = time.monotonic()
        status: int | None = None
        ended, detail = False, ""
        try:
            with http.stream("POST", self.url, json={**self.body, "seed": index}) as answer:
                status = answer.status_code
                if status != 200:
                    detail, ended = _reason(answer.read()), True
                else:
                    for line in answer.iter_lines():
                        if line == "data: [DONE]":
                            ended = True
                        elif line.startswith("data: ") and "error" in (item := json.loads(line[6:])):
                            detail, ended = item["error"]["message"], True
        except (httpx.HTTPError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
        return Asked(status, ended, detail, time.monotonic() - began)


def _reason(body: bytes) -> str:
    """The message of an error in OpenAI's shape; empty where there is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
