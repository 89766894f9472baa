"""The `train_jobs` section: what is trained, on what data, how, and by how many workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from cluster.config.sections.data import DataConfig
from cluster.config.sections.model import ModelConfig
from cluster.config.sections.parallel import Dtype, ParallelConfig
from cluster.config.sections.section import Argument, Name, Section, VariableName


class WorkersConfig(Section):
    """How many workers, and what each of them takes."""

    min: int = Field(default=1, ge=1)
    """Workers without which the job does not start."""
    max: int | None = Field(default=None, ge=1)
    """Most workers the job takes when devices are free. Default: min."""
    group: int | None = Field(default=None, ge=1)
    """Workers of one replica group: groups join, leave and are lost while the others go on. Default: those of
    one copy of the model, for ddp between `min` and `max`; else all workers are one group, which starts
    again when their number changes."""
    per_node: int | None = Field(default=None, ge=1)
    """Workers of one node: so many on each node that has any, as torchrun's --nproc-per-node has them.
    Default: as many as fit."""
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
    """First steps over which the learning rate rises; all of the job's where it has fewer."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Last steps over which `warmup_stable_decay` falls. Default: a tenth of the job's steps."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """What is left of the learning rate at the end."""


class EvaluateConfig(Section):
    """When the held-out text is evaluated."""

    every_steps: int | None = Field(default=50, ge=1)
    """Evaluate every n steps, and after the last; null evaluates nothing, and needs no held-out data."""


GREATER_IS_BETTER = {"loss": False, "perplexity": False, "accuracy": True}
"""By metric that is known: whether the greater one is the better."""


class CheckpointConfig(Section):
    """When the state is saved, and how much of it is kept."""

    every_steps: int = Field(default=50, ge=1)
    keep: int = Field(default=3, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_best: int = Field(default=0, ge=0)
    """How many of those with the best metric are kept beside them."""
    metric: str = Field(default="loss", min_length=1)
    """The mean of an evaluation that keep_best goes by: loss, perplexity, accuracy, or a task's own."""
    greater_is_better: bool | None = None
    """Whether the greater metric is the better. Default: as it is for loss, perplexity and accuracy; a task's
    own metric needs it."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are multiples of this are kept for good."""
    asynchronous: bool = True
    """Write in the background while training goes on; the save still counts only once it is whole."""

    @property
    def prefers_greater(self) -> bool:
        """Whether the greater metric is the better, said or known."""
        known = GREATER_IS_BETTER.get(self.metric, False)
        return known if self.greater_is_better is None else self.greater_is_better


class LossSpikeConfig(Section):
    """What is done about a loss far above those of the steps before."""

    policy: Literal["warn", "skip", "go_back"] | None = None
    """`warn` logs an event; `skip` leaves out the step's update; `go_back` returns to the newest checkpoint
    and passes over the batch; null looks for no spikes."""
    window_steps: int = Field(default=64, ge=8)
    """Steps that a loss is compared with; until there are so many, no loss is judged."""
    threshold: float = Field(default=6.0, gt=0)
    """A loss is a spike when it is above the median by more than so many robust standard deviations (1.4826 ×
    the median absolute deviation), and by more than so many hundredths of the median."""


class ExportConfig(Section):
    """How the trained model is written."""

    precision: Dtype | None = None
    """Of its weights. Default: that of model.directory, where training started from one; else fp32."""


class RecoveryConfig(Section):
    """How many failures a job survives, of each class so many in a row, and what it does about steps that go
    wrong. A count begins anew whenever the job got further than ever before."""

    worker_failures: int = Field(default=10, ge=0)
    """Times in a row that the job is started again after it lost a worker process."""
    node_failures: int = Field(default=100, ge=0)
    """Times in a row that the job is started again after it lost a node, or a node's accelerator: that is not
    its fault."""
    hangs: int = Field(default=3, ge=0)
    """Times in a row that the job is started again after a hang, which costs `hang_timeout_s` each time."""
    start_failures: int = Field(default=5, ge=0)
    """Times in a row that the job tries to start its workers again after that failed."""
    memory_failures: int = Field(default=1, ge=0)
    """Times in a row that the job is started again after a worker ran out of memory."""
    transient_errors: int = Field(default=5, ge=0)
    """Times in a row that the job is started again after an exception that may pass, of the network or of the
    storage. Any other exception of the code that is trained with ends the job at once, but see `retry`."""
    retry: Literal["passing", "any"] = "passing"
    """Which exceptions of the code that is trained with are tried again: those that may pass, or `any`, as
    often as `worker_failures` says (torchrun's --max-restarts)."""
    checkpoint_failures: int = Field(default=3, ge=0)
    """Times in a row that a checkpoint may fail to be saved before the job ends."""
    begin_anew: bool = False
    """Begin at step 0 again where checkpoints were saved and none of them can be loaded; otherwise the job
    stops and says so."""
    heartbeat_timeout_s: float = Field(default=2.0, ge=0.2)
    """Seconds of silence after which a replica group counts as lost, and the others go on without it."""
    hang_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds within which a rank that gets no micro-batch done is found and its group ended, to be started
    again."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """The same for a rank's start, to the end of its first step: fetching data, reading or building weights,
    loading a checkpoint, compiling; and for waiting until other groups have started."""
    save_timeout_s: float = Field(default=1800.0, gt=0)
    """The same for writing a checkpoint, and for exporting the model."""
    non_finite_loss: Literal["stop", "skip", "go_back"] = "stop"
    """What a loss or a norm of the gradient that is NaN or infinite does: `stop` ends the job, `skip` leaves
    out the step's update, `go_back` returns to the newest checkpoint and passes over the batch."""
    loss_spike: LossSpikeConfig = LossSpikeConfig()
    skips_in_a_row: int = Field(default=10, ge=1)
    """Steps in a row that may be skipped before the job ends."""
    go_backs: int = Field(default=10, ge=1)
    """Times that a job may go back before it ends."""
    straggler_factor: float | None = Field(default=2.0, gt=1)
    """A rank whose micro-batches take so many times as long as those of the other ranks (their median) is
    named as a straggler; null looks for none."""


TASKS = ("causal_lm", "image_classification", "script")
TASK_PATTERN = rf"^({'|'.join(TASKS)}|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)$"

TaskName = Annotated[str, StringConstraints(pattern=TASK_PATTERN), Field(examples=list(TASKS))]


ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


def _progress_pattern(value: str) -> str:
    try:
        groups = re.compile(value).groupindex
    except re.error as error:
        raise ValueError(f"should be a regular expression: {error}") from error
    if "step" not in groups:
        raise ValueError("should have a group `step`, for example `iter (?P<step>\\d+)`")
    unknown = sorted(set(groups) - {"step", "steps", "loss"})
    if unknown:
        raise ValueError(f"has a group `{unknown[0]}`; known are step, steps and loss")
    return value


Pattern = Annotated[str, AfterValidator(_progress_pattern)]

BUILT_IN_SOURCES = {"causal_lm": "python-stdlib", "image_classification": "sklearn-digits"}
"""By task: the data that is no path, but comes with Python or a package; the default."""
ARCHITECTURES = {"causal_lm": "llama", "image_classification": "resnet"}
"""By task: the model that starts from sizes."""


class TrainJobConfig(Section):
    """One training job."""

    task: TaskName = "causal_lm"
    """What is trained: `causal_lm`, `image_classification`, `script` (an unchanged torchrun script), or a
    class of yours, `your.module:TaskName`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    workers: WorkersConfig = WorkersConfig()
    priority: int = 0
    """Jobs of a greater priority have devices first."""
    weight: float = Field(default=1.0, gt=0)
    """Share of contended devices among jobs of one priority: a job of weight 2 is due twice as much."""
    accelerator: str | None = Field(default=None, min_length=1)
    """The only kind of node its workers run on, as cluster.nodes name it. Default: any."""
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Dtype = "fp32"
    """Arithmetic of the model (fp16 with a loss scale); parameters and optimizer state stay fp32."""
    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    working_dir: str | None = None
    """The folder that travels with the job, a path from the config file: where modules of a task of yours,
    `script` and `cwd` are looked for. Default: the config file's."""
    script: str | None = None
    """The script of task `script`, a path from `working_dir`."""
    module: ModuleName | None = None
    """The module that task `script` runs instead, as `python -m` does."""
    cwd: str | None = None
    """Where the script runs, a folder below `working_dir`. Default: that one."""
    progress: Pattern | None = None
    """How far a script is, as rank 0 prints it: a regular expression with a group `step`, and `steps` (of how
    many) and `loss` where they are printed, for example `iter (?P<step>[0-9]+): loss (?P<loss>[0-9.]+)`. With
    it the script's steps are shown and counted, and a script that hangs is found: one of which rank 0 prints
    nothing, and writes nothing into $SHOAL_CHECKPOINT_DIR, for `recovery.hang_timeout_s`."""
    arguments: tuple[Argument, ...] = Field(default=(), strict=False)
    """Arguments of the script; numbers, true and false as they are written. `$SHOAL_CHECKPOINT_DIR`,
    `$SHOAL_EXPORT_DIR` and `$SHOAL_WORK_DIR` stand for directories of the job."""
    env: dict[VariableName, Argument | None] = Field(default={})
    """Environment variables of the job's processes (NCCL_DEBUG, HF_HOME, …). null passes on the value that a
    variable has where the job is submitted, of `ray job submit` in the environment of its entrypoint; it is
    kept nowhere, so that whoever resumes the job needs it too."""
    pip: tuple[str, ...] | None = Field(default=None, strict=False)
    """Packages to install for the job, as Ray's runtime_env has them (`lightning==2.5`)."""
    exclude: tuple[str, ...] = Field(default=(), strict=False)
    """What of the folder does not travel with the job, as patterns of git's; beside what .gitignore,
    .rayignore and .shoalignore leave out."""
    settings: dict[str, Any] = Field(default={})
    """Anything that a task of yours wants to know."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Initial weights and the order of the data follow from it."""
    profile_every_steps: int | None = Field(default=200, ge=10)
    """One step in so many is profiled, for the share of a step that waits for communication; such a step is
    slower. null profiles none."""
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    export: ExportConfig = ExportConfig()
    publish: Name | None = None
    """Name under which the trained model is published in the registry; null publishes nothing."""
    publish_best: bool = False
    """Publish (and export) the checkpoint with the best `checkpoint.metric` instead of the last step; needs
    `checkpoint.keep_best`."""

    @property
    def source(self) -> str | None:
        """Where the data comes from, the task's own default where none is given."""
        return self.data.source or BUILT_IN_SOURCES.get(self.task)

    @property
    def architecture(self) -> str | None:
        return self.model.architecture or ARCHITECTURES.get(self.task)

    @property
    def group_size(self) -> int | None:
        """Workers of one replica group; None where all workers are one group."""
        if self.workers.group is not None:
            return self.workers.group
        copies = self.parallel.engine == "torch" and self.parallel.strategy == "ddp" and self.task != "script"
        if copies and self.workers.min < self.workers.most:
            return self.parallel.tensor * self.parallel.context
        return None

    @property
    def unit_size(self) -> int:
        """Workers that are placed together, on one node."""
        return self.workers.per_node or self.parallel.tensor

    def folder(self, base: Path) -> Path:
        """What travels with the job; `base` is the config file's folder, and the paths are absolute."""
        return base if self.working_dir is None else Path(self.working_dir)

    @property
    def is_custom(self) -> bool:
        """Whether the task is a class of the user's."""
        return ":" in self.task
