"""The devices of a rank are those of its app's lease, whatever the machine has."""

from __future__ import annotations

import os

from serve_apps.engine.protocol import EngineConfig

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that show a process its devices, and no others."""


def hide_what_is_not_leased(config: EngineConfig) -> None:
    """Let this process see no GPU where its engine has none; to be called before anything of CUDA is.

    Ray shows a process that asks for no GPU all of its node's, and libraries take the first that they see.
    """
    if config.device == "cpu":
        os.environ.update(dict.fromkeys(VISIBLE, ""))
