"""How much of a GPU's memory is left for keys and values, once the largest step has shown what it takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

GPU_SHARE = 0.9
"""Part of the memory left on a GPU that the KV cache takes; the rest is for what no measurement shows: what
choosing tokens takes, memory that is free, but in pieces."""


def gpu_room(device: torch.device, largest_step: Callable[[], None]) -> int:
    """Bytes for the KV cache of a GPU that holds a rank's weights.

    As in vLLM, the largest step is run first: what it takes for a moment must stay free beside the cache, and
    what libraries take at their first use and keep (workspaces, communicators) is taken by then.

    Args:
        largest_step: runs it; what it needs beside the weights is free again afterwards.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_step()
    torch.cuda.synchronize(device)
    moment = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    return max(0, int(free * GPU_SHARE) - moment)
