"""What is wrong with a job's data, as far as it is seen without reading it."""

from __future__ import annotations

from importlib.util import find_spec

from cluster.config.checks.ground import MistakeReport, path_problem
from cluster.config.sections.train import BUILT_IN_SOURCES, TrainJobConfig
from cluster.errors import RequestError

_FOOTERS = 100
"""Files of a data set whose footers are read: validation answers at once. The job looks at all."""
_SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
"""Those of pyarrow.fs."""


def check_data(job: TrainJobConfig, report: MistakeReport) -> None:
    """Report what is wrong with the `data` section of a job; its paths are absolute."""
    data, built_in = job.data, BUILT_IN_SOURCES.get(job.task)
    if data.source in set(BUILT_IN_SOURCES.values()) - {built_in} and not job.is_custom:
        report("data.source", data.source, f"`{data.source}` is no data for task {job.task}", "task")
    elif data.source is not None and data.source not in BUILT_IN_SOURCES.values():
        choice = f"{built_in}, or a" if built_in else "a"
        _check_source(
            job, "source", data.source, report, f"; it should be {choice} Parquet file or directory"
        )
    if data.held_out_source is not None:
        _check_source(job, "held_out_source", data.held_out_source, report)
    if data.group_by_length and data.packing:
        report("data.group_by_length", True, "has no effect beside data.packing (true)", "data.packing")
    if job.task == "image_classification":
        _check_images(job, report)


def _check_source(job: TrainJobConfig, key: str, source: str, report: MistakeReport, hint: str = "") -> None:
    """A path or URI; of files that lie here the footers are read, for their columns and types."""
    there = None if set(source) & set("*?[") else path_problem(source)
    problem = there or (None if job.is_custom else _uri_problem(source))
    if problem is not None:
        report(f"data.{key}", source, f"`{source}` {problem}{hint}")
        return
    if "://" in source and not source.startswith("file://"):
        return
    from cluster.files.backend import StorageError  # pyarrow takes a while
    from cluster.files.parquet import ParquetFiles, wanted_columns

    wanted = wanted_columns(job.task, job.data)
    if not wanted:
        return
    uses = [f"data.{column.key}" for column in wanted]
    try:
        files = ParquetFiles(source, [column.name for column in wanted], key="")
        for index in range(min(len(files.fragments), _FOOTERS)):
            files.group_sizes(index)
        problems = [problem for column in wanted if (problem := files.misfit(column)) is not None]
    except (RequestError, StorageError) as error:
        problems = [str(error)]
    for problem in problems:
        report(f"data.{key}", source, problem, "task", *uses)


def _uri_problem(source: str) -> str | None:
    """What a URI lacks in itself; stores are not asked."""
    scheme, mark, rest = source.partition("://")
    if mark and scheme not in _SCHEMES:
        return f"has an unknown scheme; pyarrow reads {', '.join(_SCHEMES)}"
    return "names no bucket, host or path" if mark and not rest.strip("/") else None


def _check_images(job: TrainJobConfig, report: MistakeReport) -> None:
    data = job.data
    if data.mean is not None and data.std is not None and len(data.mean) != len(data.std):
        message = f"should be as many numbers as data.mean ({len(data.mean)}), was {len(data.std)}"
        report("data.std", data.std, message, "data.mean")
    # Only looked for, not imported: validation answers at once.
    missing = [package for package in ("PIL",) if find_spec(package) is None]
    if job.source == BUILT_IN_SOURCES["image_classification"] and find_spec("sklearn") is None:
        missing.append("sklearn")
    if missing:
        packages = " and ".join({"PIL": "Pillow", "sklearn": "scikit-learn"}[name] for name in missing)
        report("task", job.task, f"images need {packages}: pip install 'shoal[images]'", "data.source")
