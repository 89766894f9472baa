"""Real gRPC servers that answer the health check, as Ray's do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from cluster.state.health import HEALTH_CHECK
from tests.certificates import make_certificate


class _Healthy(grpc.GenericRpcHandler):
    def service(self, called: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        asked = called.method == HEALTH_CHECK
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\x08\x01") if asked else None


@contextmanager
def healthy_server(tls: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of one; with TLS, of one that asks whom it speaks to.

    Args:
        tls: Ray's variables.
    """
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Healthy()])
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        key, certificate = (Path(tls[f"RAY_TLS_SERVER_{part}"]).read_bytes() for part in ("KEY", "CERT"))
        credentials = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def tls_of_ray(folder: Path, *addresses: str) -> dict[str, str]:
    """Ray's variables, as its guide has them set, for nodes at these addresses; its files are there."""
    named = ",".join(f"IP:{address}" for address in ("127.0.0.1", *addresses))
    certificate, key = make_certificate(folder, "ray", named)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": certificate,
        "RAY_TLS_SERVER_KEY": key,
        "RAY_TLS_CA_CERT": certificate,
    }
