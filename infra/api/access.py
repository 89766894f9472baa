"""What opens the control API: a random number of 256 bits, for which SHA-256 without salt is enough.

Whoever has brought a cluster up has a token that nobody hands out.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from pathlib import Path

from cluster.errors import ShoalError
from cluster.state.record import ClusterRecord

PREFIX = "shoal-"
"""How every token begins, so that people and scanners know one when they see it."""


def new_token() -> str:
    """A new token."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def own_token(record: ClusterRecord) -> str:
    """The token of whoever can join the Ray cluster, who may do everything there anyway.

    It follows from Ray's token, and from the cluster's id where Ray has none: so it is the same for all of
    them, and after a restart; where Ray has a token also when the cluster has come back as another one.

    Raises:
        ShoalError: Ray's token cannot be read.
    """
    secret = record.cluster_id
    if record.token_path is not None:
        try:
            secret = Path(record.token_path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ShoalError(f"the token of cluster {record.name} cannot be read: {error}") from error
    said = hmac.new(secret.encode(), f"shoal control {record.name}".encode(), hashlib.sha256)
    return PREFIX + base64.urlsafe_b64encode(said.digest()).decode().rstrip("=")
