"""The `parallel` part of a training job: how one model is spread over the workers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cluster.config.sections.section import Section

Strategy = Literal["data_parallel", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]

REPLICATING = ("data_parallel", "ddp", "zero1")
"""Strategies that keep all parameters on every rank."""
SHARDING = ("fsdp", "hsdp", "zero2", "zero3")
"""Strategies built on FSDP2."""
TENSOR = ("ddp", *SHARDING)
"""Strategies beside which a model can be tensor-parallel."""
GROUPED = ("ddp", *SHARDING)
"""Strategies under which replica groups of a job can join and leave."""

Dtype = Literal["fp32", "bf16", "fp16"]


class DDPConfig(Section):
    """Settings of DistributedDataParallel (strategies `ddp` and `zero1`), under torch's names."""

    bucket_cap_mb: float = Field(default=25.0, gt=0)
    """Gradients are all-reduced in buckets of this many MiB, while backward still runs."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Look in each step for parameters that got no gradient, which the others otherwise wait for: of a model
    that does not use all of its parameters in every step."""
    gradient_as_bucket_view: bool = True
    """Let gradients lie in the buckets: no second copy of them."""
    sync_batch_norm: bool = False
    """Batch statistics over all workers instead of each worker's own (needs GPUs)."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """What travels in place of fp32 gradients."""
    powersgd_rank: int = Field(default=1, ge=1)
    """Rank of the matrices that PowerSGD sends for a gradient."""
    powersgd_warmup_steps: int = Field(default=10, ge=2)
    """Steps whose gradients travel whole before PowerSGD begins."""


class FSDPConfig(Section):
    """Settings of FSDP2 (strategies `fsdp`, `hsdp`, `zero2` and `zero3`)."""

    param_dtype: Dtype | None = None
    """What parameters are gathered and computed in. Default: the job's precision."""
    reduce_dtype: Dtype | None = None
    """What gradients are summed over the ranks in. Default: fp32, which keeps small ones."""
    output_dtype: Dtype | None = None
    """What the model's outputs are cast to. Default: they stay as they are."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch rather than once a step: more traffic, and no rank ever holds
    the whole model's gradients."""


class ParallelConfig(Section):
    """How one model is spread over the workers."""

    engine: Literal["torch", "deepspeed"] = "torch"
    """What steps the model: torch, as `strategy` says, or DeepSpeed, as its own config says."""
    deepspeed: Any = Field(default=None, json_schema_extra={"type": ["object", "string", "null"]})
    """Of engine `deepspeed`: its config, or the path of its JSON file from the config file; `auto` stands for
    what the job says."""
    strategy: Strategy = "ddp"
    """`data_parallel`: one process, several GPUs; `ddp`: a copy on every worker; `fsdp`: parameters,
    gradients and optimizer state sharded; `hsdp`: sharded inside a node, copied across nodes; `zero1`:
    optimizer state sharded; `zero2`: gradients too; `zero3`: as fsdp, with all of it in CPU memory."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of one copy; they share a node. Beside ddp, fsdp, hsdp, zero2 and zero3."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence (context parallelism)."""
    context_method: Literal["gather", "ulysses", "ring"] = "gather"
    """How attention sees the whole sequence: keys and values gathered, heads exchanged (all-to-all), or
    torch's ring attention (GPUs only)."""
    shard: int | None = Field(default=None, ge=1)
    """Ranks over which `hsdp` shards. Default: those of one node."""
    offload: bool | None = None
    """Keep parameters, gradients and optimizer state of fsdp, hsdp, zero2 or zero3 in CPU memory. Default:
    true for zero3, else false."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Which activations backward computes anew: none, all within a block, or all but the results of matrix
    products and attention."""
    compile: bool = False
    """Compile the model's blocks with torch.compile."""
    ddp: DDPConfig = DDPConfig()
    fsdp: FSDPConfig = FSDPConfig()

    @property
    def shards(self) -> bool:
        """The ranks hold shards of the parameters between steps."""
        return self.engine == "torch" and self.strategy in SHARDING

    @property
    def offloads(self) -> bool:
        return self.strategy == "zero3" if self.offload is None else self.offload
