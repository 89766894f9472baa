"""HAProxy's configuration for the gateways of a cluster, as text; no processes, no Ray."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from cluster.loopback import own_address
from serve_apps.front.secret import HEADER, ID_HEADER, SENT_HEADER
from serve_apps.front.slots import BACKEND

MOST_CONNECTIONS = 20_000
BUFFER_BYTES = 64 * 1024
"""Of a request so much is kept until its answer begins, to be sent again where its gateway dies. A head is no
larger, and a body of that size has come before a gateway is asked."""
FULL = 3 / 4
"""From this share of all connections on an address gets no more that has MOST_OF_ADDRESS of them, so that one
who holds many leaves others room."""
MOST_OF_ADDRESS = 1 / 4
END_S = 2
"""How long what a client still sends after its last answer is thrown away, so that it can read that."""
SILENT_S = 5
"""A host that has lost its power ends no connection: who answers nothing at all for so long, to probes of its
kernel or to what was sent, is taken for gone."""
RETRY_S = 1
"""HAProxy's own pause before it sends a request again that could not be sent."""
LEAST_RETRIES = 3
RATE_S = 10
"""Seconds over which the requests of an address are counted."""
HARD_STOP_S = 660
"""How long a process that was replaced may take for the requests that it has."""
SOCKET = "haproxy.sock"
"""Where HAProxy is told of changes, and its next process gets the listeners."""
ALPN = "h2,http/1.1"
METRICS = "/metrics/front"
"""Where HAProxy's own figures are, for Prometheus."""


@dataclass(frozen=True)
class FrontSettings:
    """Where the front listens, and what it bounds; see `GatewayConfig`.

    Attributes:
        secret: see `front_secret`.
        connections: that it may have at all, each with one to a gateway.
        certificate: file with the chain; its key lies beside it, with `.key` after its name. None: plain
            HTTP.
        metrics_from: addresses and networks that may read METRICS; None: all.
    """

    host: str
    port: int
    secret: str
    connections: int = MOST_CONNECTIONS
    certificate: str | None = None
    address_connections: int | None = None
    address_requests: int | None = None
    metrics_from: tuple[str, ...] | None = None
    absent_s: float = 20.0
    """How long a request waits where there is no gateway: one that hangs is found, and another started."""
    request_s: float = 30.0
    """How long a request's head may take to arrive, and as much of its body as is kept."""
    stalled_s: float = 60.0
    """How long a client may take nothing of what waits for it, or send nothing of a body."""


def haproxy_config(settings: FrontSettings, servers: Iterable[str], directory: str) -> str:
    """The file.

    Args:
        servers: see `Slots.servers`.
        directory: where `own_answers` lie, and SOCKET is to be.
    """
    return "\n".join(
        [
            "global",
            f"    maxconn {settings.connections}",
            f"    tune.bufsize {BUFFER_BYTES}",
            f"    stats socket unix@{directory}/{SOCKET} mode 600 level admin expose-fd listeners",
            f"    hard-stop-after {HARD_STOP_S}s",
            "    ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets",
            "",
            "defaults",
            "    mode http",
            "    option redispatch 1",
            "    option abortonclose",
            "    option http-buffer-request",
            # What was sent on a connection that had other requests before is sent again without a pause, as
            # often as it may be, and at the end its client's connection is closed without a word.
            "    option http-server-close",
            # Before an answer begins its request is sent to another gateway; what was begun is not repeated.
            f"    retries {max(LEAST_RETRIES, math.ceil(settings.absent_s / RETRY_S))}",
            "    retry-on conn-failure empty-response",
            "    timeout connect 2s",
            f"    timeout http-request {_ms(settings.request_s)}",
            "    timeout http-keep-alive 75s",
            "    timeout queue 5s",
            f"    timeout client {_ms(settings.stalled_s)}",
            f"    timeout client-fin {END_S}s",
            # Gateways bound how long an answer takes; some take long to begin.
            "    timeout server 24h",
            *(f"    errorfile {status} {directory}/{answer_file(status)}" for status in own_answers()),
            "",
            "frontend public",
            f"    bind {_bind(settings)}",
            *(f"    {line}" for line in _bounds(settings)),
            *(f"    {line}" for line in _metrics(settings)),
            "    http-request set-header X-Forwarded-For %[src]",
            "    http-request set-header X-Forwarded-Proto https if { ssl_fc }",
            "    http-request set-header X-Forwarded-Proto http unless { ssl_fc }",
            f"    http-request set-header {HEADER} {settings.secret}",
            f"    http-request set-header {ID_HEADER} %[uuid()]",
            f"    http-request set-header {SENT_HEADER} %[date(0,ms)]",
            f"    default_backend {BACKEND}",
            "",
            f"backend {BACKEND}",
            "    balance leastconn",
            "    option httpchk GET /health",
            "    option srvtcpka",
            "    srvtcpka-idle 2s",
            "    srvtcpka-intvl 1s",
            f"    srvtcpka-cnt {SILENT_S - 2}",
            # Who refuses a connection gets none until it answers again.
            "    default-server inter 1s fastinter 250ms downinter 250ms fall 2 rise 1 observe layer4"
            f" error-limit 1 on-error mark-down tcp-ut {SILENT_S}s",
            *(f"    {line}" for line in servers),
            # While no gateway is there requests try this one, which nobody is, each time they are to be sent
            # again: so they wait for the next gateway. Without it they would be refused at once.
            f"    server none {own_address()}:1 backup",
            "",
        ]
    )


def _ms(seconds: float) -> str:
    return f"{round(1000 * seconds)}ms"


def _bind(settings: FrontSettings) -> str:
    host = "*" if settings.host in ("", "0.0.0.0") else settings.host
    host = f"[{host}]" if ":" in host else host
    tls = "" if settings.certificate is None else f" ssl crt {settings.certificate} alpn {ALPN}"
    return f"{host}:{settings.port}{tls}"


def _metrics(settings: FrontSettings) -> list[str]:
    told = f"http-request use-service prometheus-exporter if {{ path {METRICS} }}"
    if settings.metrics_from is None:
        return [told]
    return [f"{told} {{ src {' '.join(settings.metrics_from)} }}"] if settings.metrics_from else []


def _bounds(settings: FrontSettings) -> list[str]:
    full, most = int(settings.connections * FULL), int(settings.connections * MOST_OF_ADDRESS)
    lines = [
        f"stick-table type ipv6 size 100k expire 60s store conn_cur,http_req_rate({RATE_S}s)",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ fe_conn gt {full} }} {{ sc0_conn_cur gt {most} }}",
    ]
    if settings.address_connections is not None:
        refusal = _refusal(
            503,
            "This address has as many connections as it may have.",
            "server_error",
            "too_many_connections",
        )
        lines.append(f"http-request {refusal} if {{ sc0_conn_cur gt {settings.address_connections} }}")
    if settings.address_requests is not None:
        message = f"This address may send {settings.address_requests} requests in {RATE_S} s."
        refusal = _refusal(429, message, "rate_limit_error", "rate_limit_exceeded", RATE_S)
        lines.append(f"http-request {refusal} if {{ sc0_http_req_rate gt {settings.address_requests} }}")
    return lines


def own_answers() -> dict[int, bytes]:
    """What HAProxy answers itself, by status: whole answers, in the shape that clients know. They are to lie
    in the directory, each in `answer_file`."""
    answers = {
        400: ("This is no request that can be read.", "invalid_request_error", "invalid_http"),
        408: ("The request did not arrive in time.", "invalid_request_error", "request_timeout"),
        502: ("The gateway ended under the request; try again.", "server_error", "gateway_lost"),
        503: ("No gateway can be reached; try again in a moment.", "server_error", "no_gateway"),
        504: ("The gateway did not answer in time.", "server_error", "timeout"),
    }
    return {status: _whole(status, *told) for status, told in answers.items()}


def answer_file(status: int) -> str:
    return f"{status}.http"


def _whole(status: int, message: str, kind: str, code: str) -> bytes:
    body = json.dumps(_error(message, kind, code)).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(["Retry-After: 1"] if status in (502, 503) else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _refusal(status: int, message: str, kind: str, code: str, retry_after_s: int = 1) -> str:
    return f'return status {status} {_content(message, kind, code)} hdr Retry-After "{retry_after_s}"'


def _content(message: str, kind: str, code: str) -> str:
    return f"content-type application/json string '{json.dumps(_error(message, kind, code))}'"


def _error(message: str, kind: str, code: str) -> Mapping[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
