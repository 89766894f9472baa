"""The script of the batch job: what is asked of Slurm, and the program that runs on its first node."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from cluster.config.sections.cluster import ClusterConfig
from cluster.state.state_directory import state_directory

PROGRAM = ("-m", "infra.slurm_job")
"""What runs on the first node, after the interpreter."""
_LOOK = "from importlib.util import find_spec as f; raise SystemExit(not (f('infra') and f('ray')))"
LOG_FILE = "slurm-%j.log"
"""In the cluster's state directory; Slurm puts the job's number in the place of %j."""


def python_of(cluster: ClusterConfig) -> str:
    """The Python on the nodes: the one that this process has where the config names none."""
    return cluster.slurm.python or sys.executable


def batch_script(cluster: ClusterConfig, config_path: Path) -> str:
    """The script, for sbatch.

    Args:
        config_path: the file that the section is from, which the first node reads.
    """
    asked, directory = cluster.slurm, state_directory(cluster.name)
    options = [
        f"--job-name=shoal-{cluster.name}",
        f"--nodes={asked.nodes}",
        "--ntasks-per-node=1",
        "--exclusive" if asked.cpus_per_node is None else f"--cpus-per-task={asked.cpus_per_node}",
        *([] if asked.gpus_per_node is None else [f"--gpus-per-node={asked.gpus_per_node}"]),
        *([] if asked.partition is None else [f"--partition={asked.partition}"]),
        *([] if asked.account is None else [f"--account={asked.account}"]),
        *([] if asked.time is None else [f"--time={asked.time}"]),
        # To this script alone: what runs under Ray is told by Shoal.
        f"--signal=B:TERM@{asked.notice_s}",
        "--requeue" if asked.requeue else "--no-requeue",
        # The cluster does without a node that is lost; where that is the first one, the others see to it.
        "--no-kill",
        "--open-mode=append",
        f"--output={directory / LOG_FILE}",
        *asked.extra,
    ]
    python = shlex.quote(python_of(cluster))
    program = shlex.join([*PROGRAM, "-f", str(config_path)])
    return "\n".join(
        [
            "#!/bin/sh",
            *(f"#SBATCH {shlex.quote(option)}" for option in options),
            "# `shoal up` submits this. By hand, before sbatch:",
            f"#   (umask 077; mkdir -p {shlex.quote(str(directory))})",
            "export PYTHONUNBUFFERED=1",
            # The same place on the nodes as here, whatever their shells say.
            f"export XDG_STATE_HOME={shlex.quote(os.path.dirname(directory.parent))}",
            f"if ! {python} -c {shlex.quote(_LOOK)}; then",
            f'    echo Shoal is not installed for {python} on "$SLURMD_NODENAME", which slurm.python names',
            "    exit 1",
            "fi",
            f"exec {python} {program}",
            "",
        ]
    )
