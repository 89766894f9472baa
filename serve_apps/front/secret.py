"""By what gateways know the front: nobody else may say whose request it is, or ask one that has no keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from cluster.config.reading.api_keys import cluster_token

HEADER = "x-shoal-front"
ID_HEADER = "x-shoal-front-id"
"""Of a request, the same when it is sent again to another gateway."""
SENT_HEADER = "x-shoal-front-sent"
"""When it was sent first, in milliseconds."""


def front_secret(info: Mapping[str, Any]) -> str:
    """What the front of a cluster shows with each request: known to who has the cluster's token.

    Args:
        info: the broker's facts about the cluster.
    """
    key = (cluster_token() or "").encode()
    return hmac.new(key, f"front {info['cluster_id']}".encode(), hashlib.sha256).hexdigest()
