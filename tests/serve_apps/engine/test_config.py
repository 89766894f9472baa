"""An engine's config, from an app's."""

from __future__ import annotations

import math

import pytest

from cluster.config.sections.serve import LimitsConfig, ServeAppConfig
from serve_apps.engine.config import engine_config
from serve_apps.spec import AppSpec


@pytest.mark.parametrize(
    ("engine", "watched", "expected"),
    [("torch", True, 20.0), ("torch", False, math.inf), ("vllm", False, None)],
)
def test_prompts_hold_nobody_up_where_nobody_sees_answers_come(
    engine: str, watched: bool, expected: float | None
) -> None:
    limits = LimitsConfig(prefill_ms=20.0 if engine == "torch" else None)
    app = ServeAppConfig.model_validate({"model": "m", "engine": engine, "limits": limits})
    config = engine_config(AppSpec("chat", app, "/m", "m@1"), "/m", watched=watched)
    assert config.prefill_ms == expected
