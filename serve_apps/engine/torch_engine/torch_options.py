"""What only the torch engine can be told, beside the fields that all engines have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from serve_apps.engine.protocol import EngineConfig, EngineError


@dataclass(frozen=True)
class TorchOptions:
    """`EngineConfig.extra` of the torch engine, and what it takes where the config leaves the choice."""

    batched_tokens: int = 2048
    prefill_ms: float = 50.0
    """Milliseconds that the prompts of one step may take beside running answers."""
    block_size: int = 32
    step_timeout_s: float = 30.0
    """How long the ranks wait for one another within a step before the replica counts as broken."""
    start_timeout_s: float = 600.0
    """How long the ranks wait for one another to appear and to load the model."""
    heartbeat_s: float = 1.0
    """How often an idle rank 0 makes sure that the others live; well below `step_timeout_s`."""
    least_step_ms: float = 0.0
    """A step lasts at least so long: to try on a core what another device's pace would be like."""

    @classmethod
    def of(cls, config: EngineConfig) -> TorchOptions:
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(config.extra) - known):
            raise EngineError(
                f"the torch engine does not know the option {', '.join(unknown)}; "
                f"it knows {', '.join(sorted(known))}"
            )
        options = cls(**config.extra)
        for name in ("batched_tokens", "prefill_ms", "block_size"):
            if (chosen := getattr(config, name)) is not None:
                options = replace(options, **{name: chosen})
        return options
