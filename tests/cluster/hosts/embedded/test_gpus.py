"""How the machine's GPUs are shared out over its nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import RequestError
from cluster.hosts.embedded.gpus import divide


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(0, 8))
@settings(deadline=None)
def test_every_node_gets_its_number_and_no_gpu_is_given_twice(wanted: list[int], spare: int) -> None:
    gpus = [f"GPU-{index}" for index in range(sum(wanted) + spare)]
    shares = divide(wanted, gpus)
    assert [len(share) for share in shares] == wanted
    given_out = [gpu for share in shares for gpu in share]
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= set(gpus)


def test_more_gpus_than_the_machine_has_are_refused() -> None:
    with pytest.raises(RequestError, match="4 GPUs together; this machine has 3"):
        divide([0, 2, 2], ["0", "1", "2"])


def test_nodes_without_gpus_need_none() -> None:
    assert divide([0, 0], ()) == [(), ()]
