"""What a head's actor was told holds on the head that it is on."""

from __future__ import annotations

import pytest

from cluster.actors.head_actor import with_head_at


@pytest.mark.parametrize(
    ("former", "now"),
    [("192.0.2.1", "192.0.2.17"), ("127.0.0.1", "192.0.2.1"), ("2001:db8::1", "2001:db8::2")],
)
def test_facts_name_the_head_where_it_is_now(former: str, now: str) -> None:
    def at(address: str) -> str:
        return f"[{address}]" if ":" in address else address

    def facts(head: str) -> dict[str, object]:
        return {
            "head_ip": head,
            "gcs_address": f"{at(head)}:6379",
            "dashboard_url": f"http://{at(head)}:8265",
            "gateway_url": f"https://{at(head)}:8000/v1",
            "api_host": head,
            "gateway_host": "0.0.0.0",
            "gateway_port": 8000,
            "storage": "/data/lab",
            "neighbour": f"{at('192.0.2.10')}:6379",  # begins as the first one does
            "note": "at 192.0.2.1, or 127.0.0.1 or 2001:db8::1, it was",
            "nodes": (),
        }

    assert with_head_at(facts(former), now) == facts(now)
    assert with_head_at(facts(former), former) == facts(former)
