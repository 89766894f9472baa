"""An app without GPUs takes none, on a machine that has some; one with GPUs does not compute without."""

from __future__ import annotations

import os

import pytest
import torch

from cluster.config.sections.serve import ServeAppConfig
from serve_apps.engine.config import engine_config
from serve_apps.engine.devices import hide_what_is_not_leased
from serve_apps.engine.protocol import EngineError
from serve_apps.engine.torch_engine.ranks import device_of
from serve_apps.spec import AppSpec


def device_named(gpus: int) -> str | None:
    config = ServeAppConfig.model_validate({"model": "./m", "gpus": gpus, "cpus": 1})
    return engine_config(AppSpec("chat", config, "/m", "m@1"), "/m").device


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_the_device_comes_from_the_lease(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, count)
    assert [device_named(gpus) for gpus in (0, 1)] == ["cpu", "cuda"]
    assert device_of(0, "cpu") == torch.device("cpu")
    assert device_of(0, None) == torch.device("cuda", 0) if count else torch.device("cpu")
    if count:
        assert device_of(3, "cuda") == torch.device("cuda", 3 % count)
    else:
        with pytest.raises(EngineError, match="takes GPUs, and rank 3 sees none"):
            device_of(3, "cuda")


@pytest.mark.parametrize(("gpus", "seen"), [(0, ""), (1, "2,3")])
def test_libraries_see_only_what_is_leased(gpus: int, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "2,3")
    config = ServeAppConfig.model_validate({"model": "./m", "gpus": gpus, "cpus": 1})
    hide_what_is_not_leased(engine_config(AppSpec("chat", config, "/m", "m@1"), "/m"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
