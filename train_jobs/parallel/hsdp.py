"""Hybrid sharding: as fsdp inside a node, as ddp across nodes.

Parameters are gathered over the node's own links; across nodes only shards of gradients are all-reduced. The
mesh makes the difference: `fully_shard` gets both of its data axes.
"""

from __future__ import annotations

from train_jobs.parallel.sharding import shard

parallelize = shard
