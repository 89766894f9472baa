"""Whether Ray's servers answer: by real gRPC servers, with TLS and without, and by what is none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.state.health import answers, listens, silent, tls_variables
from tests.certificates import make_certificate
from tests.grpc_health import healthy_server, tls_of_ray

PLAIN = {"RAY_USE_TLS": "0"}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tls_of_ray(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(tls: dict[str, str]) -> Iterator[str]:
    with healthy_server(tls) as address:
        yield address


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with healthy_server() as address:
        yield address


def test_a_server_with_tls_answers_who_has_its_certificates(
    secure: str, plain: str, tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(secure, environment=tls)
    assert not answers(secure, 1.0, environment=PLAIN)
    assert not answers(plain, 1.0, environment=tls)
    assert silent({"secure": secure, "plain": plain}, 1.0, environment=tls) == ["plain"]
    for name, value in tls.items():
        monkeypatch.setenv(name, value)
    assert answers(secure)
    assert answers(plain, environment=PLAIN), "what is known of a cluster goes before what this shell says"
    other = make_certificate(Path(tls["RAY_TLS_SERVER_CERT"]).parent, "other", "IP:127.0.0.1")[0]
    assert not answers(secure, 1.0, environment={**tls, "RAY_TLS_CA_CERT": other})


def test_what_is_kept_of_the_variables_holds_in_any_directory(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tls["RAY_TLS_CA_CERT"]).parent
    monkeypatch.chdir(folder)
    asked = {**tls, "RAY_TLS_CA_CERT": "ray.pem", "HOME": "/root", "RAY_USE_TLS": "true"}
    assert tls_variables(asked) == tls
    assert tls_variables({}) == PLAIN
    assert tls_variables({**tls, "RAY_USE_TLS": "0"}) == PLAIN


def test_a_certificate_that_cannot_be_read_is_named(secure: str, tls: dict[str, str]) -> None:
    with pytest.raises(ShoalError, match=r"^RAY_TLS_SERVER_KEY: No such file or directory: /nowhere\.key$"):
        answers(secure, environment={**tls, "RAY_TLS_SERVER_KEY": "/nowhere.key"})


def test_what_listens_and_does_not_answer_is_told_from_what_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        assert (answers(address, 0.3, PLAIN), listens(address)) == (False, True)
    assert (answers(address, 0.3, PLAIN), listens(address)) == (False, False)
