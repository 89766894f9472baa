"""Lines of processes: which are about a request or an app, and how people see them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.util.state
from ray.util.state.exception import RayStateApiException

from cluster.errors import ShoalError
from infra import app_logs
from infra.app_logs import AppLogs, AppProcess, Wanted, Written, _last, _lines, sources_of
from infra.log_lines import LogLine, Origin
from serve_apps.http.request_record import RequestRecord, client_id

ENDED = {
    "time": "2026-01-02T03:04:05.678Z",
    "request_id": "r-1",
    "endpoint": "/v1/completions",
    "method": "POST",
    "status": 503,
    "app": "chat",
    "tenant": None,
    "replicas": ["abc", "def"],
    "seconds": 0.25,
    "error": "replica_lost",
}
SAID = {"time": "2026-01-02T03:04:05.678Z", "level": "ERROR", "message": "it broke", "request_id": "r-1"}


def read(line: Any) -> LogLine:
    found = LogLine.read(line if isinstance(line, str) else json.dumps(line))
    assert found is not None
    return found


def test_people_see_when_what_happened_and_to_which_request() -> None:
    ended = read(ENDED).shown()
    for part in (
        "POST /v1/completions 503 0.25 s",
        "error=replica_lost",
        "replicas=abc,def",
        "(request r-1)",
    ):
        assert part in ended
    assert "None" not in ended
    assert (
        read({**SAID, "traceback": "Traceback …\n  at x"})
        .shown()
        .endswith("(request r-1)\nTraceback …\n  at x")
    )
    for other in ("plain", "{not json", '{"json": "of somebody else"}', "[1]", "{}"):
        assert read(other).shown() == other


@pytest.mark.parametrize(
    ("line", "about"),
    [
        (ENDED, True),
        (SAID, True),
        ({**SAID, "request_id": "r-12"}, False),
        ({**SAID, "request_id": "r-2", "message": "before r-1"}, False),
        ({**SAID, "request_id": None, "message": "lost r-1-0a1b2c3d-0"}, True),
        ("vLLM says: aborted r-1-0a1b2c3d-0.", True),
        ("about r-12", False),
        ("about xr-1", False),
        ("about no one", False),
    ],
    ids=str,
)
def test_a_line_is_about_the_request_that_it_names(line: Any, about: bool) -> None:
    assert read(line).is_about("r-1") == about


def test_lines_of_other_apps_and_rays_own_marks_are_no_lines_of_an_app() -> None:
    assert read(ENDED).is_of("chat")
    assert not read(ENDED).is_of("code")
    assert read({**ENDED, "app": None}).is_of("code"), "it named no app that there is"
    assert read("anything").is_of("code")
    assert LogLine.read(":actor_name:ServeReplica:chat:1:replica") is None
    assert LogLine.read("") is None


@pytest.mark.parametrize("given", ["r-1", "a", "x-0a1b2c3d-0", "0a1b2c3d-1-", "é 1"])
def test_a_clients_id_comes_back_from_an_engines(given: str) -> None:
    engine_id = f"{RequestRecord(given).engine_id()}-7"
    for key in (engine_id, f"{engine_id}-tokens", f"{engine_id}-{'0f' * 16}"):
        assert client_id(key) == given
    assert client_id("shoal-probe-1") == "shoal-probe-1"


def row(name: str | None, state: str = "ALIVE", **more: Any) -> Any:
    return SimpleNamespace(name=name, state=state, actor_id=f"id of {name}", node_id="n", pid=1, **more)


ROWS = [
    row("SERVE_CONTROLLER_ACTOR"),
    row(None),
    row("SERVE_REPLICA::gateway#gateway#gw"),
    row("SERVE_REPLICA::chat:1#replica#new"),
    row("SERVE_REPLICA::chat:1#replica#old", "DEAD"),
    row("SERVE_REPLICA::chat-2:1#replica#other"),
]


def test_the_processes_of_an_app_are_found_by_their_names() -> None:
    prefixes = [source.origin.prefix for source in sources_of(ROWS, "chat")]
    assert prefixes == ["[old]", "[new]", "[gateway]"]
    assert [s.origin.prefix for s in sources_of(ROWS, "chat", "old")] == ["[old]"]
    assert [s.origin.prefix for s in sources_of(ROWS, "gateway")] == ["[gateway]"]
    assert sources_of(ROWS, "nothing") == sources_of(ROWS, "") == []
    assert [s.alive for s in sources_of(ROWS, "chat")] == [False, True, True]


def test_a_line_of_a_rank_says_so() -> None:
    replica = Origin("replica", "new")
    said = {"time": "2026-01-01T00:00:00Z", "rank": 1, "message": "rank 1 follows"}
    assert replica.of(read(said)).prefix == "[new rank 1]"
    assert replica.of(read({**said, "rank": None})) is replica
    assert replica.of(read("anything")) is replica


def test_lines_are_whole_whatever_the_pieces_are() -> None:
    text = "one\r\ntwo – é\n\nno end"
    for size in (1, 2, 3, 100):
        data = text.encode()
        pieces = iter([data[at : at + size] for at in range(0, len(data), size)])
        assert list(_lines(pieces)) == ["one", "two – é", "", "no end"]
    assert list(_lines(iter([b"\xff\n"]))) == ["\ufffd"]


def test_the_last_lines_are_the_last_that_are_wanted() -> None:
    raw = [
        json.dumps({**SAID, "request_id": f"r-{number % 2}", "message": str(number)}) for number in range(10)
    ]
    chosen, number = _last(iter(raw), Wanted("chat", request="r-1", tail=2))
    assert [(n, line.document["message"]) for n, line in chosen if line.document] == [(8, "7"), (10, "9")]
    assert number == 10
    assert not _last(iter(raw), Wanted("chat", tail=0))[0]


def test_where_a_node_is_gone_the_file_on_this_machine_is_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.util.state

    def gone(**asked: Any) -> Any:
        raise RayStateApiException("the node is dead\nand more")

    monkeypatch.setattr(ray.util.state, "get_log", gone)
    logs = AppLogs.__new__(AppLogs)
    logs._address, logs._directory = "nowhere", tmp_path
    folder = tmp_path / "n1" / "session_1" / "logs"
    folder.mkdir(parents=True)
    (folder / "worker-aa-01-77.err").write_text(
        ":job_id:01\n:actor_name:ServeReplica:chat:1:replica\nlast words\n"
    )
    (folder / "worker-bb-01-77.err").write_text(
        ":actor_name:ServeReplica:code:1:replica\nof another process\n"
    )
    process = AppProcess(Origin("replica", "old"), "chat:1", "id", "n", 77, alive=False)
    assert list(logs._raw(process, "err"))[-1] == "last words"
    with pytest.raises(
        ShoalError, match=r"^\[old\] its out file cannot be read from its node: the node is dead$"
    ):
        list(logs._raw(process, "out"))


@pytest.mark.parametrize("past", [0, 2], ids=["from the start", "of two lines that are known"])
def test_following_goes_on_where_an_answer_broke_off(past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_logs, "LOOK_EVERY_S", 0.0)
    answers = [["one\n", "tw"], [OSError("reset")], ["one\ntwo\n"], ["one\ntwo\nthree\n"]]
    monkeypatch.setattr(ray.util.state, "get_log", lambda **asked: pieces(answers.pop(0)))
    dead: set[str] = set()

    def pieces(parts: list[Any]) -> Iterator[bytes]:
        for part in parts:
            if isinstance(part, OSError):
                raise part
            yield part.encode()
        if not answers:
            dead.add("id")
            answers.append(["one\ntwo\nthree\nlast\n"])

    logs = AppLogs.__new__(AppLogs)
    logs._address, logs._directory = "nowhere", Path("/nowhere")
    process = AppProcess(Origin("replica", "r"), "chat:1", "id", "n", 77, alive=True)
    lines: list[str] = []
    said: list[str] = []

    def put(written: Written) -> None:
        lines.append(f"{written.number} {written.line.text}")

    logs._feed(process, "err", Wanted("chat"), past, dead, put, said.append)
    assert lines == ["1 one", "2 two", "3 three", "4 last"][past:]
    assert len(said) == 1


def test_ray_is_not_imported_before_it_can_know_the_cluster() -> None:
    """It reads how to authenticate when it is imported."""
    program = "import infra.app_logs, infra.cli.logs, sys; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
