"""The machine of a head's pod loses its power, while a job trains and an app is asked."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from infra.tenant_book import TenantBook
from tests.kubernetes_load import ON_REDIS, busy_site, wait_for
from tests.kubernetes_site import needs_kubectl
from train_jobs.records.run_log import METRICS

pytestmark = [
    needs_kubectl,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

KEPT = ("control", "tenants", "ml", "lab")


@pytest.mark.parametrize("store", [ON_REDIS, None], ids=["store on redis", "store on the head"])
@pytest.mark.parametrize("in_s3", [False, True], ids=["storage on a volume", "storage in s3"])
def test_the_next_head_goes_on_with_jobs_and_apps(
    store: dict[str, str] | None, in_s3: bool, tmp_path: Path
) -> None:
    """With its machine go the job's driver, the broker, Serve's controller and the front."""
    with busy_site(tmp_path, store, in_s3=in_s3) as site:
        assert site.operator.pods is not None
        head = site.operator.pods.head
        attempt = site.lines(METRICS)[-1]["attempt"]
        cut = time.monotonic()
        head.host.cut_power()
        made = site.operator.replace(head)
        assert made.host.address != head.host.address
        back_s = wait_for(lambda: 200 in site.said(cut + 0.1), "the app does not answer again")
        print(f"the head lost its power: the app answered again after {back_s:.1f} s")
        back_s += wait_for(lambda: site.lines(METRICS)[-1]["attempt"] > attempt, "the job does not go on")
        print(f"the head lost its power: the job did a step again after {back_s:.1f} s")
        (job,) = [row for row in site.user.document("jobs") if row["job"] == site.job]
        assert job["status"] == "running"
        (app,) = site.user.document("status")["apps"]
        assert app["name"] == "chat"
        asked = time.monotonic()
        wait_for(lambda: len(site.said(asked)) > 10, "nobody asks any more")
        assert set(site.said(asked)) == {200}
        kept = TenantBook(site.storage().child(*KEPT).location)
        assert (kept.jobs(), [app["name"] for app in kept.apps()]) == ([site.job], ["chat"])
        if not in_s3:  # which is gone with the pods here
            assert site.user.shoal("down").returncode == 0
            assert (kept.jobs(), kept.apps(), kept.left()) == ([], [], []), "the next `up` brings them back"
