"""Ray's own way: what the replicas had, from what was seen of them now and then."""

from __future__ import annotations

import pytest

from infra.lab.bench.rays_own import replica_seconds


def test_replicas_count_for_as_long_as_they_were_seen() -> None:
    seen = [(5.0, 1), (10.0, 1), (12.0, 2), (15.0, 1), (30.0, 2)]
    assert replica_seconds(seen, 10.0, 20.0) == pytest.approx(2 * 1 + 3 * 2 + 5 * 1)
    assert replica_seconds(seen, 31.0, 32.0) == 0
