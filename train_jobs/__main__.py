"""What runs inside the cluster: `python -m train_jobs NAME`, by `shoal train` or by `ray job submit`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import ray

from cluster.actors import NAMESPACE
from cluster.config.find import find_config
from cluster.config.loader import load_config
from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.sharing.client import BrokerClient
from train_jobs.driver.driver import Driver
from train_jobs.driver.left_behind import end_process
from train_jobs.driver.submission import new_job_id, record_submission
from train_jobs.records.run_config import read_run_config
from train_jobs.spec import env_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train_jobs", description="Run one training job of shoal.yaml."
    )
    parser.add_argument("name", help="the job's name in the config file")
    parser.add_argument("-f", "--file", help="the config file (default: shoal.yaml here or above)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value")
    parser.add_argument("--job", help="go on with this job, whose config lies in its directory already")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> int:
    ray.init(namespace=NAMESPACE, log_to_driver=True)
    storage = Storage(BrokerClient().info()["storage"])
    if options.job is not None:
        job = options.job
        config = read_run_config(storage, job)[1]
    else:
        # The working directory is a copy on this node; the storage is the cluster's, wherever the file lay.
        settings = [*options.set, f"cluster.storage={storage.location}"]
        scope = f"train_jobs.{options.name}"
        loaded = load_config(find_config(options.file), settings, scope, others=False)
        job, config = new_job_id(options.name), loaded.resolved.train_jobs[options.name]
        if config.working_dir is not None and config.folder(loaded.base).resolve() != Path.cwd():
            raise RequestError(
                f"train_jobs.{options.name}.working_dir is not where `ray job submit` has put the job: what"
                " travels says its own --working-dir, and `shoal train` takes that of the config"
            )
        env_of(config, os.environ)  # what it refuses becomes no job, as it does not by `shoal train`
        record_submission(storage, job, options.name, config, _submission_id())
    return Driver(job, config, storage).run()


def _submission_id() -> str | None:
    """Ray's id of the submission that this driver belongs to; None for a driver that nobody submitted."""
    from ray.util.state import list_jobs

    mine = ray.get_runtime_context().get_job_id()
    return next((job.submission_id for job in list_jobs() if job.job_id == mine), None)


if __name__ == "__main__":
    end_process(main())
