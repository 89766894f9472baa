"""The key file is followed as it changes, and nothing that is wrong or half written takes anybody's key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.reading.api_keys import KeyRing, digest_of, parse_keys
from serve_apps.controller import key_file
from serve_apps.controller.key_file import KeyFile


def entries(*keys: str) -> str:
    return "".join(f"- {{sha256: {digest_of(key)}, tenant: {key}}}\n" for key in keys)


def known(file: KeyFile, key: str) -> bool:
    told = file.told("")
    return told is not None and KeyRing.from_json(told["entries"]).find(f"Bearer {key}") is not None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_it_is_parsed_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(entries("a"))
    parsed: list[str] = []
    monkeypatch.setattr(key_file, "READ_EVERY_S", 0.001)
    monkeypatch.setattr(
        key_file, "parse_keys", lambda text, source: parsed.append(text) or parse_keys(text, source)
    )

    async def go() -> None:
        file = KeyFile(str(path))
        following = asyncio.create_task(file.follow())
        await until(lambda: known(file, "a"))
        await asyncio.sleep(0.1)
        assert len(parsed) == 1
        told = file.told("")
        assert told is not None
        assert file.told(told["digest"]) is None
        path.write_text("- [")
        await until(lambda: file.failure != "")
        assert file.failure == f"{path} is not valid YAML"
        assert known(file, "a"), "a wrong file changes nothing"
        path.write_text(entries("b"))
        await until(lambda: known(file, "b"))
        assert file.failure == ""
        following.cancel()

    asyncio.run(go())


def test_one_that_is_being_written_takes_nobodys_key(monkeypatch: pytest.MonkeyPatch) -> None:
    one, both = entries("a"), entries("a", "b")
    reads = iter([one, one, "", both[: len(one)], both, both])
    monkeypatch.setattr(key_file, "READ_EVERY_S", 0.001)
    monkeypatch.setattr(key_file, "read_keys", lambda path: next(reads, both))
    parsed: list[str] = []
    monkeypatch.setattr(
        key_file, "parse_keys", lambda text, source: parsed.append(text) or parse_keys(text, source)
    )

    async def go() -> None:
        file = KeyFile("keys.yaml")
        following = asyncio.create_task(file.follow())
        await until(lambda: known(file, "b"))
        following.cancel()

    asyncio.run(go())
    assert parsed == [one, both], "an empty file was taken for one without keys"


def test_gateways_that_need_none_are_told_of_none() -> None:
    async def go() -> None:
        file = KeyFile(None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await file.follow()
        assert file.told("") is None

    asyncio.run(go())
