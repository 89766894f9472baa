"""What only the torch engine can be told, beside the fields that all engines have."""

from __future__ import annotations

from dataclasses import dataclass, fields

from serve_apps.engine.protocol import EngineConfig, EngineError


@dataclass(frozen=True)
class TorchOptions:
    """`EngineConfig.extra` of the torch engine."""

    prefill_tokens: int = 2048
    """Most tokens of one prefill, with padding."""
    step_timeout_s: float = 30.0
    """How long the ranks wait for one another within a step before the replica counts as broken."""
    start_timeout_s: float = 600.0
    """How long the ranks wait for one another to appear and to load the model."""
    heartbeat_s: float = 1.0
    """How often an idle rank 0 makes sure that the others live; well below `step_timeout_s`."""

    @classmethod
    def of(cls, config: EngineConfig) -> TorchOptions:
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(config.extra) - known):
            raise EngineError(
                f"the torch engine does not know the option {', '.join(unknown)}; "
                f"it knows {', '.join(sorted(known))}"
            )
        return cls(**config.extra)
