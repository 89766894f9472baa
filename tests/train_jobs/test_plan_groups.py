"""Which groups a grant pays for."""

from __future__ import annotations

from pathlib import Path

from cluster.config import TrainJobConfig
from train_jobs.spec import plan_groups


def test_one_group_takes_the_whole_grant_with_the_ranks_of_a_node_together() -> None:
    config = TrainJobConfig.model_validate({"workers": {"min": 1, "max": 5}})
    (group,) = plan_groups("lm-1", config, Path("/run"), 3, ["b", "a", "b", "a", "c"])
    assert group.nodes == ("a", "a", "b", "b", "c")
    assert group.world_size == 5
    assert (group.job, group.attempt, group.index, group.run) == ("lm-1", 3, 0, Path("/run"))
