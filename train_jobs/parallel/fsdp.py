"""Fully sharded data parallelism: parameters, gradients and optimizer state over all data-parallel ranks.

A block's parameters are whole only while it computes (ZeRO stage 3; Rajbhandari et al., SC 2020).
"""

from __future__ import annotations

from train_jobs.parallel.sharding import shard

parallelize = shard
