"""What a batch job of Slurm's runs on its first node: the cluster of a config.

python -m infra.slurm_job -f FILE
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from cluster.config.loader import load_config
from cluster.errors import ConfigError, ShoalError
from cluster.hosts.slurm.allocation import Allocation, number_of
from cluster.hosts.slurm.batch_job import BatchJob, read_batch_job
from cluster.state.record import token_of
from cluster.version import version
from infra.lifecycle import COMMAND, UP

TENANTS = ("-m", "infra.tenants")
"""What has jobs and apps leave, and come back, after the interpreter."""


def job_of(config_path: Path, number: str) -> BatchJob:
    """The batch job that this process is in, as `shoal up` has submitted it; or as somebody did by hand.

    Raises:
        ConfigError: the config cannot be read.
        ShoalError: another batch job has the cluster.
    """
    cluster = load_config(config_path, across=False).resolved.cluster
    known = read_batch_job(cluster.name)
    if known is not None and known.version != version():
        raise ShoalError(
            f"Shoal here is {version()}, and {known.version} where `shoal up` was called: one version on all"
        )
    if known is not None and known.number in ("", number):
        job = known.numbered(number)  # its first node may be faster than who submits it
    elif known is not None:
        raise ShoalError(
            f"cluster {cluster.name} has {known.words} already; `shoal down` ends that one, and forgets it"
        )
    else:
        section = cluster.model_dump(mode="json", exclude_unset=True)
        job = BatchJob(cluster.name, str(uuid.uuid4()), str(config_path), section, number)
    job.write()
    token_of(job.name)
    return job


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="infra.slurm_job")
    parser.add_argument("-f", dest="file", type=Path, required=True)
    try:
        job = job_of(parser.parse_args(arguments).file.absolute(), number_of(os.environ))
        allocation = Allocation(
            job,
            up=(*COMMAND, *UP),
            leave=(*TENANTS, "leave"),
            come_back=(*TENANTS, "come-back"),
        )
        return allocation.run()
    except (ShoalError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
