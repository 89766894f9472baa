"""ZeRO stage 3 with offloading: as fsdp, and the shards lie in CPU memory between their uses.

Parameters travel to the GPU as they are gathered, gradients back as they are reduced, and the optimizer steps
on the CPU (Ren et al., ZeRO-Offload, USENIX ATC 2021). `parallel.offload: false` keeps the shards on the GPU.
"""

from __future__ import annotations

from train_jobs.parallel.sharding import shard

parallelize = shard
