"""Which groups a grant pays for."""

from __future__ import annotations

from cluster.config.sections.train import TrainJobConfig
from train_jobs.spec import plan_groups


def test_one_group_takes_the_whole_grant_with_the_ranks_of_a_node_together() -> None:
    config = TrainJobConfig.model_validate({"workers": {"min": 5}})
    (group,) = plan_groups("lm-1", config, "/run", 3, ["b", "a", "b", "a", "c"])
    assert group.nodes == ("a", "a", "b", "b", "c")
    assert group.world_size == 5
    assert (group.job, group.attempt, group.index, group.run) == ("lm-1", 3, 0, "/run")


def test_an_elastic_job_runs_as_groups_on_the_nodes_of_their_units() -> None:
    config = TrainJobConfig.model_validate({"workers": {"min": 1, "max": 5}})
    groups = plan_groups("lm-1", config, "/run", 3, ["b", "a", "b"])
    assert [group.nodes for group in groups] == [("b",), ("a",), ("b",)]
    assert [group.name for group in groups] == ["3-0", "3-1", "3-2"]


def test_units_of_a_group_stand_together_with_their_tensor_parallel_workers() -> None:
    config = TrainJobConfig.model_validate(
        {
            "parallel": {"strategy": "fsdp", "tensor": 2},
            "workers": {"min": 4, "max": 8, "group": 4},
        }
    )
    groups = plan_groups("lm-1", config, "/run", 1, ["b", "a", "c", "c"])
    assert [group.nodes for group in groups] == [("a", "a", "b", "b"), ("c", "c", "c", "c")]


def test_workers_of_a_node_stand_together_and_the_mesh_takes_whole_nodes() -> None:
    workers = {"min": 4, "max": 12, "per_node": 4}
    script = TrainJobConfig.model_validate({"task": "script", "script": "a.py", "workers": workers})
    (group,) = plan_groups("lm-1", script, "/run", 1, ["b", "a"])
    assert group.nodes == ("a",) * 4 + ("b",) * 4
    parallel = {"strategy": "fsdp", "tensor": 2, "context": 4}
    mesh = TrainJobConfig.model_validate({"parallel": parallel, "workers": workers})
    (group,) = plan_groups("lm-1", mesh, "/run", 1, ["c", "b", "a"])
    assert group.nodes == ("a",) * 4 + ("b",) * 4
