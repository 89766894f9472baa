"""What is wrong with how a job is spread over its workers, seen with its model, its batch and the nodes."""

from __future__ import annotations

from cluster.config.checks.ground import Ground, MistakeReport
from cluster.config.checks.worker_checks import check_room, check_workers
from cluster.config.models.model_sizes import ModelSizes
from cluster.config.sections.parallel import GROUPED, SHARDING, TENSOR, DDPConfig, FSDPConfig
from cluster.config.sections.section import Section
from cluster.config.sections.train import TrainJobConfig

_SHOWN_SIZES = 8


def check_parallel(
    job: TrainJobConfig, sizes: ModelSizes | None, ground: Ground, report: MistakeReport
) -> None:
    """Report every mistake; `sizes` are the model's, None where they are not known."""
    _check_settings(job, report)
    _check_gpus(job, report)
    check_workers(job, report)
    if not _check_axes(job, report):
        return  # what the workers would have to be follows from the axes
    if sizes is not None:
        _check_heads(job, sizes, report)
    _check_divisors(job, report)
    _check_replica_groups(job, report)
    _check_batch(job, report)
    check_room(job, ground, report)


def _check_axes(job: TrainJobConfig, report: MistakeReport) -> bool:
    """Whether the strategy knows the axes that are asked for."""
    parallel, strategy = job.parallel, job.parallel.strategy
    name = f"parallel.strategy ({strategy})"
    for axis in ("tensor", "context"):
        if job.task == "image_classification" and getattr(parallel, axis) > 1:
            message = f"should be 1 under task {job.task}, was {getattr(parallel, axis)}"
            report(f"parallel.{axis}", getattr(parallel, axis), message, "task")
            return False
    if parallel.tensor > 1 and strategy not in TENSOR:
        message = (
            f"should be 1 under {name}, was {parallel.tensor}; {', '.join(TENSOR)} know tensor parallelism"
        )
        report("parallel.tensor", parallel.tensor, message, "parallel.strategy")
        return False
    if strategy == "data_parallel" and parallel.context > 1:
        message = f"should be 1 under {name}, was {parallel.context}"
        report("parallel.context", parallel.context, message, "parallel.strategy")
        return False
    if strategy == "data_parallel" and job.workers.most > 1:
        key = "min" if job.workers.min > 1 else "max"
        given = getattr(job.workers, key)
        message = f"should be 1 under {name}, which is one process with all its GPUs, was {given}"
        report(f"workers.{key}", given, message, "parallel.strategy")
        return False
    return True


def _check_settings(job: TrainJobConfig, report: MistakeReport) -> None:
    """Settings that the strategy has no use for."""
    parallel, strategy = job.parallel, job.parallel.strategy
    name = f"parallel.strategy ({strategy})"
    if parallel.shard is not None and strategy != "hsdp":
        message = f"has a meaning under parallel.strategy hsdp only, not under {strategy}"
        report("parallel.shard", parallel.shard, message, "parallel.strategy")
    if parallel.offload and strategy not in SHARDING:
        message = f"should be false under {name}; {', '.join(SHARDING)} know offloading"
        report("parallel.offload", parallel.offload, message, "parallel.strategy")
    if parallel.compile and parallel.tensor > 1:
        message = (
            f"should be false beside parallel.tensor ({parallel.tensor}): torch 2.13 compiles wrong gradients"
            " where sharded and whole tensors meet"
        )
        report("parallel.compile", True, message, "parallel.tensor")
    if strategy not in ("ddp", "zero1") or parallel.tensor > 1:
        where = f"under {name}" if parallel.tensor == 1 else f"beside parallel.tensor ({parallel.tensor})"
        _report_idle("parallel.ddp", parallel.ddp, DDPConfig(), where, report)
    if strategy not in SHARDING and parallel.tensor == 1:
        _report_idle("parallel.fsdp", parallel.fsdp, FSDPConfig(), f"under {name}", report)


def _report_idle(key: str, given: Section, defaults: Section, where: str, report: MistakeReport) -> None:
    """A setting that would be read by nobody."""
    for name in type(given).model_fields:
        value = getattr(given, name)
        if value != getattr(defaults, name):
            uses = ("parallel.strategy", "parallel.tensor")
            report(f"{key}.{name}", value, f"has no effect {where}, was {_shown(value)}", *uses)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_gpus(job: TrainJobConfig, report: MistakeReport) -> None:
    if job.workers.gpus:
        return
    if job.parallel.ddp.sync_batch_norm:
        message = "needs workers with GPUs: torch synchronises batch statistics on GPUs only"
        report("parallel.ddp.sync_batch_norm", True, message, "workers.gpus")
    if job.parallel.context_method == "ring" and job.parallel.context > 1:
        message = "needs workers with GPUs: torch has ring attention for CUDA only; was ring"
        report("parallel.context_method", "ring", message, "workers.gpus", "parallel.context")


def _check_heads(job: TrainJobConfig, sizes: ModelSizes, report: MistakeReport) -> None:
    tensor, context = job.parallel.tensor, job.parallel.context
    for words, heads in (("attention heads", sizes.heads), ("key and value heads", sizes.kv_heads)):
        if heads is None:
            continue
        uses = ("parallel.tensor", "model.num_heads", "model.num_kv_heads", "model.directory")
        if heads % tensor:
            message = f"should divide the model's {words} ({heads}), was {tensor}"
            report("parallel.tensor", tensor, message, *uses)
            return
        if job.parallel.context_method == "ulysses" and heads // tensor % context:
            message = f"should divide the {words} of a rank ({heads // tensor}) for ulysses, was {context}"
            report("parallel.context", context, message, "parallel.context_method", *uses)
            return


def _check_divisors(job: TrainJobConfig, report: MistakeReport) -> None:
    parallel, workers = job.parallel, job.workers
    inner = parallel.tensor * parallel.context
    if job.task == "causal_lm" and job.data.sequence_length % parallel.context:
        message = (
            f"should be a multiple of parallel.context ({parallel.context}), was {job.data.sequence_length}"
        )
        report("data.sequence_length", job.data.sequence_length, message, "parallel.context")
    what, divisor = "parallel.tensor × parallel.context", inner
    if parallel.shard is not None and parallel.strategy == "hsdp":
        what, divisor = f"{what} × parallel.shard", inner * parallel.shard
    for key in ("min", "max"):
        number = getattr(workers, key)
        if number is not None and number % divisor:
            message = f"should be a multiple of {what} ({divisor}), was {number}"
            uses = ("parallel.tensor", "parallel.context", "parallel.shard")
            report(f"workers.{key}", number, message, *uses)


def _check_replica_groups(job: TrainJobConfig, report: MistakeReport) -> None:
    """What cannot be done by several groups, and groups that the workers cannot be divided into."""
    parallel, workers, size = job.parallel, job.workers, job.group_size
    if size is None:
        return
    if parallel.engine != "torch" or parallel.strategy not in GROUPED:
        what = f"parallel.strategy {parallel.strategy}"
        what = what if parallel.engine == "torch" else f"parallel.engine {parallel.engine}"
        message = f"has no meaning under {what}; {', '.join(GROUPED)} know replica groups"
        report("workers.group", workers.group, message, "parallel.strategy", "parallel.engine")
        return
    inner = parallel.tensor * parallel.context * (parallel.shard or 1)
    if size % inner:
        message = f"should be a multiple of {inner}, the workers of one copy of the model, was {size}"
        report("workers.group", size, message, "parallel.tensor", "parallel.context", "parallel.shard")
        return
    uses = ("workers.group", "workers.min", "workers.max")
    for key in ("min", "max"):
        number = getattr(workers, key)
        if number is not None and number % size and size > inner:
            message = f"should be a multiple of workers.group ({size}), was {number}"
            report(f"workers.{key}", number, message, *uses)
    if parallel.ddp.compression == "powersgd":
        message = "should be none, fp16 or bf16 where replica groups come and go; was powersgd"
        report("parallel.ddp.compression", "powersgd", message, *uses)
    if parallel.ddp.sync_batch_norm:
        message = "should be false where replica groups come and go: a forward pass would meet the others"
        report("parallel.ddp.sync_batch_norm", True, message, *uses)


def _check_batch(job: TrainJobConfig, report: MistakeReport) -> None:
    whole, micro, workers = job.batch.global_size, job.batch.micro, job.workers
    inner = job.parallel.tensor * job.parallel.context
    if workers.min % inner or workers.most % inner:
        return  # uneven workers were told already
    if whole % micro:
        message = f"should be a multiple of batch.micro ({micro}) × workers, was {whole}"
        report("batch.global", whole, message, "batch.micro")
        return
    if job.group_size is not None:
        _check_batch_of_groups(job, job.group_size, report)
        return
    sizes = uneven_sizes(whole // micro, workers.min // inner, workers.most // inner)
    if not sizes:
        return
    shown = ", ".join(str(size * inner) for size in sizes[:_SHOWN_SIZES])
    shown += ", …" if len(sizes) > _SHOWN_SIZES else ""
    between = str(workers.min) if workers.min == workers.most else f"{workers.min} to {workers.most}"
    share = "workers" if inner == 1 else f"workers / {inner} (parallel.tensor × parallel.context)"
    message = (
        f"should be a multiple of batch.micro ({micro}) × {share} at every number of workers ({between});"
        f" {whole} is none at {shown}"
    )
    uses = ("batch.micro", "workers.min", "workers.max", "parallel.tensor", "parallel.context")
    report("batch.global", whole, message, *uses)


def _check_batch_of_groups(job: TrainJobConfig, size: int, report: MistakeReport) -> None:
    """Ranks of one group take equally many micro-batches; groups may differ by one of each rank's."""
    whole, micro, workers = job.batch.global_size, job.batch.micro, job.workers
    ranks = max(1, size // (job.parallel.tensor * job.parallel.context))
    groups = workers.most // size
    uses = ("batch.micro", "workers.group", "workers.max", "parallel.tensor", "parallel.context")
    if whole % (micro * ranks):
        message = f"should be a multiple of batch.micro ({micro}) × data-parallel ranks of a group ({ranks})"
        report("batch.global", whole, f"{message}, was {whole}", *uses)
    elif whole < micro * ranks * groups:
        least = micro * ranks * groups
        message = f"should be at least {least}, a micro-batch for each rank of {groups} groups, was {whole}"
        report("batch.global", whole, message, *uses)


def uneven_sizes(micro_batches: int, least: int, most: int) -> list[int]:
    """The first few numbers of data-parallel ranks that cannot share the micro-batches evenly."""
    sizes: list[int] = []
    for size in range(least, most + 1):
        if micro_batches % size:
            sizes.append(size)
        # All sizes beyond the number of micro-batches are uneven: a huge range needs no walk.
        if len(sizes) > _SHOWN_SIZES:
            break
    return sizes
