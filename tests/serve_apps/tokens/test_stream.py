"""Tokens over real sockets: each to its request, from those who hold the keys, and an end for the lost."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from serve_apps.gateway.options import GatewayOptions
from serve_apps.tokens import stream
from serve_apps.tokens.inbox import Inbox
from serve_apps.tokens.stream import StreamAddress, TokenReceiver, TokenSender, UnreachableError

HOST = "127.0.0.1"


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def within() -> None:
            await asyncio.wait_for(test(), 30)

        asyncio.run(within())

    run.__name__ = test.__name__
    return run


@asynccontextmanager
async def receiving() -> AsyncIterator[TokenReceiver]:
    receiver = TokenReceiver(HOST)
    task = asyncio.create_task(receiver.run())
    try:
        yield receiver
    finally:
        task.cancel()
        await asyncio.wait([task])
        receiver.stop()


async def sender_to(receiver: TokenReceiver) -> tuple[TokenSender, list[str]]:
    lost: list[str] = []
    sender = TokenSender(lost.append)
    await sender.connect(receiver.address.as_json())
    return sender, lost


async def text_of(inbox: Inbox) -> str:
    text = ""
    while True:
        item = await inbox.get()
        text += item["text"]
        if item.get("finish_reason"):
            return text


@in_loop
async def test_each_item_arrives_at_its_own_request_in_order() -> None:
    async with receiving() as receiver:
        sender, lost = await sender_to(receiver)
        inboxes = {str(number): Inbox(lambda: 0.0) for number in range(20)}
        for key, inbox in inboxes.items():
            receiver.open(key, inbox)
        for step in range(50):
            for key in inboxes:
                item: dict[str, Any] = {"text": f"{key}.{step} ", "token_ids": [step]}
                sender.send(
                    receiver.address.endpoint, key, item | ({"finish_reason": "stop"} if step == 49 else {})
                )
            await asyncio.sleep(0)
        for key, inbox in inboxes.items():
            assert await text_of(inbox) == "".join(f"{key}.{step} " for step in range(50))
        assert not lost
        sender.stop()


@in_loop
async def test_what_one_turn_brings_is_one_message() -> None:
    async with receiving() as receiver:
        sender, _ = await sender_to(receiver)
        packed: list[int] = []
        original = msgpack.packb
        try:
            msgpack.packb = lambda items: (packed.append(len(items)), original(items))[1]  # type: ignore[assignment]
            for number in range(32):
                sender.send(receiver.address.endpoint, str(number), {"text": "a", "token_ids": [1]})
            await asyncio.sleep(0.01)
        finally:
            msgpack.packb = original
        assert packed == [32]
        sender.stop()


@pytest.mark.parametrize("wrong", ["client_secret", "server_key", "none at all"])
def test_who_has_not_the_keys_gives_nothing_in(wrong: str) -> None:
    @in_loop
    async def go() -> None:
        async with receiving() as receiver:
            inbox = Inbox(lambda: 0.0)
            receiver.open("known", inbox)
            address = receiver.address
            if wrong == "none at all":
                with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
                    socket.linger = 0
                    socket.connect(address.endpoint)
                    socket.send(msgpack.packb([("known", {"text": "forged", "token_ids": []})]))
                    await asyncio.sleep(0.5)
            else:
                public, secret = (key.decode() for key in zmq.curve_keypair())
                changes = {"server_key": public}
                if wrong == "client_secret":
                    changes = {"client_public": public, "client_secret": secret}
                forged = TokenSender(lambda endpoint: None)
                with pytest.raises(UnreachableError):
                    await forged.connect(dataclasses.replace(address, **changes).as_json())
                forged.send(address.endpoint, "known", {"text": "forged", "token_ids": []})
                await asyncio.sleep(0.5)
                forged.stop()
            sender, _ = await sender_to(receiver)
            sender.send(address.endpoint, "known", {"text": "true", "token_ids": [], "finish_reason": "stop"})
            assert await text_of(inbox) == "true"
            sender.stop()

    go()


@in_loop
async def test_items_nobody_waits_for_are_dropped_and_the_others_arrive() -> None:
    async with receiving() as receiver:
        sender, _ = await sender_to(receiver)
        inbox = Inbox(lambda: 0.0)
        receiver.open("open", inbox)
        receiver.open("closed", Inbox(lambda: 0.0))
        receiver.close("closed")
        for key in ("closed", "unknown", "open"):
            sender.send(
                receiver.address.endpoint, key, {"text": key, "token_ids": [], "finish_reason": "stop"}
            )
        assert await text_of(inbox) == "open"
        sender.stop()


GATEWAY = """
import asyncio, json
from serve_apps.tokens.stream import TokenReceiver

async def main():
    receiver = TokenReceiver("127.0.0.1")
    print(json.dumps(receiver.address.as_json()), flush=True)
    await receiver.run()

asyncio.run(main())
"""


@in_loop
async def test_a_gateway_that_is_killed_is_told_as_lost() -> None:
    import json

    gateway = subprocess.Popen(
        [sys.executable, "-c", GATEWAY], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert gateway.stdout is not None
    address = StreamAddress(**json.loads(await asyncio.to_thread(gateway.stdout.readline)))
    gone = asyncio.Event()
    lost: list[str] = []
    sender = TokenSender(lambda endpoint: (lost.append(endpoint), gone.set())[0])
    await sender.connect(address.as_json())
    sender.send(address.endpoint, "a", {"text": "a", "token_ids": []})
    await asyncio.sleep(0.3)
    assert not lost
    os.kill(gateway.pid, signal.SIGKILL)
    await asyncio.wait_for(gone.wait(), 10)
    assert lost == [address.endpoint]
    # What is still sent to it goes nowhere, and a new one may come at another address.
    sender.send(address.endpoint, "a", {"text": "a", "token_ids": []})
    await asyncio.sleep(0.01)
    sender.stop()
    await asyncio.to_thread(gateway.wait)
    gateway.stdout.close()


@in_loop
async def test_a_way_that_is_blocked_is_told_at_once_and_costs_nothing() -> None:
    # Connections are taken by the system, and nobody answers them: as behind a firewall that drops.
    with pytest.MonkeyPatch.context() as patched, socket.create_server((HOST, 0)) as silent:
        patched.setattr(stream, "CONNECT_S", 0.3)
        async with receiving() as receiver:
            endpoint = f"tcp://{HOST}:{silent.getsockname()[1]}"
            blocked = dataclasses.replace(receiver.address, endpoint=endpoint).as_json()
            lost: list[str] = []
            sender = TokenSender(lost.append)
            began = time.monotonic()
            several = await asyncio.gather(
                *(sender.connect(blocked) for _ in range(5)), return_exceptions=True
            )
            assert time.monotonic() - began < 2
            assert all(isinstance(each, UnreachableError) and endpoint in str(each) for each in several)
            await sender.connect(receiver.address.as_json())  # another gateway is reached all the same
            inbox = Inbox(lambda: 0.0)
            receiver.open("a", inbox)
            item = {"text": "true", "token_ids": [], "finish_reason": "stop"}
            sender.send(receiver.address.endpoint, "a", item)
            assert await text_of(inbox) == "true"
            assert lost == []
            sender.stop()


@in_loop
async def test_ports_may_be_named_and_are_told_when_all_are_taken() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"ports {port}-{port} of {HOST} is in use .*token_ports"):
            TokenReceiver(HOST, (port, port))
        receiver = TokenReceiver(HOST, (port, port + 50))
        assert port < int(receiver.address.endpoint.rpartition(":")[2]) <= port + 50
        receiver.stop()
    assert GatewayOptions.from_json({"token_ports": "20000-20010"}).token_ports == (20000, 20010)
    assert GatewayOptions.from_json({"token_ports": "20000"}).token_ports == (20000, 20000)
    assert GatewayOptions.from_json({}).token_ports is None
