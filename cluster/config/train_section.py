"""The `train_jobs` section: what is trained, on what data, how, and by how many workers."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from cluster.config.parallel_section import Dtype, ParallelConfig
from cluster.config.section import Name, Section


class ModelConfig(Section):
    """A causal language model: from sizes, or from a directory in the Hugging Face format."""

    directory: str | None = None
    """Continue from this Hugging Face directory (relative to the config file); the sizes are then its own."""
    architecture: Literal["llama"] = "llama"
    """Architecture of a model that starts from sizes."""
    hidden_size: int = Field(default=256, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP. Default: 8/3 of hidden_size, rounded up to a multiple of 64."""
    num_layers: int = Field(default=4, ge=1)
    num_heads: int = Field(default=8, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads (grouped-query attention). Default: num_heads."""
    vocab_size: int = Field(default=4096, ge=257)
    """Tokens of the byte-level BPE that is trained when the data names no tokenizer."""
    max_position_embeddings: int = Field(default=2048, ge=1)
    """Longest sequence the model is made for, in tokens."""
    tie_word_embeddings: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_size(self) -> int:
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64


class DataConfig(Section):
    """The text to train on."""

    source: str = Field(default="python-stdlib", min_length=1)
    """`python-stdlib` (the sources of this Python's standard library), or a Parquet file or directory."""
    text_column: str = Field(default="text", min_length=1)
    """Column of the Parquet data that holds the text."""
    sequence_length: int = Field(default=256, ge=2)
    """Tokens in one sample."""
    tokenizer: str | None = None
    """Hugging Face tokenizer directory. Default: the model directory's, else one is trained on the data."""
    packing: bool = True
    """Cut the text into samples of exactly sequence_length; false makes each document a sample (or several)
    and pads it."""
    group_by_length: bool = False
    """Without packing: put samples of similar length into a micro-batch."""
    workers: int = Field(default=0, ge=0)
    """Processes that load a worker's data ahead of its steps; with 0 the worker loads it itself."""
    held_out_every: int = Field(default=20, ge=2)
    """Every n-th document (in the order of their paths or rows) is kept for evaluation."""


class WorkersConfig(Section):
    """How many workers, and what each of them takes."""

    min: int = Field(default=1, ge=1)
    """Workers without which the job does not start."""
    max: int | None = Field(default=None, ge=1)
    """Most workers the job takes when devices are free. Default: min."""
    cpus: int = Field(default=1, ge=0)
    """CPUs a worker."""
    gpus: int = Field(default=0, ge=0)
    """GPUs a worker."""

    @property
    def most(self) -> int:
        return self.min if self.max is None else self.max


class BatchConfig(Section):
    """How many samples make a step."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    global_size: int = Field(default=32, ge=1, alias="global")
    """Samples a step, over all workers."""
    micro: int = Field(default=8, ge=1)
    """Samples a worker takes through the model at once."""


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "sgd", "adafactor"] = "adamw"
    learning_rate: float = Field(default=3.0e-3, gt=0)
    """At its highest, after the warm-up."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to matrices only; norms and biases are left out. Decoupled, but for `sgd`, where it is added to
    the gradient."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1.0e-8, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of `sgd`."""
    nesterov: bool = False
    """Nesterov's momentum, for `sgd`."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global norm to which gradients are clipped; null turns clipping off."""
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)
    """Last steps over which `warmup_stable_decay` falls. Default: a tenth of the job's steps."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """What is left of the learning rate at the end."""


class EvaluateConfig(Section):
    """When the held-out text is evaluated."""

    every_steps: int | None = Field(default=50, ge=1)
    """Evaluate every n steps; null evaluates only at the end."""


class CheckpointConfig(Section):
    """When the state is saved, and how much of it is kept."""

    every_steps: int = Field(default=50, ge=1)
    keep: int = Field(default=3, ge=1)
    """How many of the newest checkpoints are kept."""
    asynchronous: bool = False
    """Write in the background while training goes on; the save still counts only once it is whole."""


class RecoveryConfig(Section):
    """How many failures a job survives."""

    worker_failures: int = Field(default=10, ge=0)
    """Times in a row that the job is started again after it lost a worker or a node; the count begins anew
    whenever the job got further than before."""
    hang_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds a collective may take before its workers count as hung."""


class TrainJobConfig(Section):
    """One training job."""

    task: Literal["causal_lm"] = "causal_lm"
    """What is trained."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    workers: WorkersConfig = WorkersConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Dtype = "fp32"
    """Arithmetic of the model (fp16 with a loss scale); parameters and optimizer state stay fp32."""
    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Initial weights and the order of the data follow from it."""
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    publish: Name | None = None
    """Name under which the trained model is published in the registry; null publishes nothing."""
