"""Whether Ray's servers answer: by real gRPC servers, with TLS and without, and by what is none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cluster.errors import ShoalError
from cluster.state.health import HEALTH_CHECK, answers, listens, silent, tls_variables
from tests.certificates import make_certificate

PLAIN = {"RAY_USE_TLS": "0"}


class _Healthy(grpc.GenericRpcHandler):
    def service(self, called: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        asked = called.method == HEALTH_CHECK
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\x08\x01") if asked else None


def _serve(credentials: grpc.ServerCredentials | None) -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Healthy()])
    where = "127.0.0.1:0"
    if credentials is None:
        port = server.add_insecure_port(where)
    else:
        port = server.add_secure_port(where, credentials)
    server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ray's variables, as its guide has them set."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder, "ray", "IP:127.0.0.1")
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": certificate,
        "RAY_TLS_SERVER_KEY": key,
        "RAY_TLS_CA_CERT": certificate,
    }


@pytest.fixture(scope="module")
def secure(tls: dict[str, str]) -> Iterator[str]:
    """The address of a server that knows whom it speaks to, as Ray's do."""
    key, certificate = (Path(tls[f"RAY_TLS_SERVER_{part}"]).read_bytes() for part in ("KEY", "CERT"))
    credentials = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)
    server, address = _serve(credentials)
    yield address
    server.stop(None)


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    server, address = _serve(None)
    yield address
    server.stop(None)


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
