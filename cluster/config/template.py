"""The config file that `shoal init` writes: it trains and serves as it is, and says what each key means."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from cluster.config.reading.schema import json_schema
from cluster.errors import RequestError

CONFIG_FILE = "shoal.yaml"
SCHEMA_FILE = "shoal.schema.json"

TEMPLATE = """\
# yaml-language-server: $schema=./shoal.schema.json
# The one config file of Shoal: a cluster, the jobs that train on it and the apps that serve from it.
# `shoal validate` lists every mistake in it; `shoal schema` prints every key there is.

cluster:
  name: demo                      # clusters of different names run side by side on one machine
  provider: embedded              # the nodes are processes of this machine
  nodes:
    - {name: head, cpus: 0}               # the first is the head; without CPUs it runs neither jobs nor apps
    - {name: worker, count: 2, cpus: 2}   # worker-1 and worker-2, each with 2 CPUs (and `gpus: n`)
  storage: ./shoal-storage        # jobs and models: a path (from this file) or a URI (s3://…, gs://…, hdfs://…)
  sharing:
    priority: serving             # who gets free devices first: serving or training
    reclaim_grace_s: 30           # seconds a tenant has to leave a device that is taken back
    patience_s: 60                # seconds a minimum waits before nodes are kept clear for it
    settle_s: 10                  # least seconds between changes of a job's workers for wants
    avoid_after: 3                # failures within an hour after which a node gets nothing new for a while

train_jobs:
  stdlib-lm:                      # `shoal train stdlib-lm`
    task: causal_lm               # or image_classification, script, or a class of yours: your.module:Task
    model:                        # its sizes; or `directory: PATH` to continue from a Hugging Face model
      architecture: llama
      hidden_size: 128            # width; a multiple of num_heads
      num_layers: 2               # transformer blocks
      num_heads: 8                # attention heads
      num_kv_heads: 4             # key and value heads (grouped-query attention); divides num_heads
      vocab_size: 2048            # tokens of the tokenizer that is trained on the data
    data:
      source: python-stdlib       # this Python's own sources; or a Parquet file or directory
      sequence_length: 128        # tokens in one sample
    parallel:
      strategy: fsdp              # data_parallel, ddp, fsdp, hsdp, zero1, zero2 or zero3
      tensor: 1                   # workers that share every matrix product (tensor parallelism)
    workers:
      min: 2                      # fewest workers the job starts with
      max: 2                      # most it takes when devices are free
      cpus: 1                     # CPUs a worker (and `gpus: n`)
    batch:
      global: 16                  # samples a step over all workers; a multiple of micro × workers
      micro: 8                    # samples a worker takes through the model at once
    optimizer:
      name: adamw
      learning_rate: 3.0e-3       # at its highest, after the warm-up
      schedule: cosine            # constant, linear, cosine or warmup_stable_decay
      warmup_steps: 20            # steps over which the learning rate rises
    precision: fp32               # arithmetic: fp32, bf16 or fp16
    steps: 200                    # optimizer steps
    seed: 1                       # initial weights and order of the data follow from it
    evaluate:
      every_steps: 50             # loss and perplexity on the held-out text, and at the end
    checkpoint:
      every_steps: 50             # how often the state is saved
      keep: 3                     # how many of the newest are kept
      asynchronous: true          # written in the background while training goes on
    recovery:
      worker_failures: 10         # lost workers in a row, without a step further, that it survives
      node_failures: 100          # the same for lost nodes
      non_finite_loss: stop       # what a NaN loss does: stop, skip the update, or go_back to a checkpoint
    publish: stdlib-lm            # the trained model's name in the registry

serve_apps:
  chat:                           # the `model` of OpenAI requests; `shoal serve chat`
    model: stdlib-lm@latest       # NAME@VERSION or NAME@ALIAS of the registry, or a directory (./… or /…)
    engine: torch                 # what runs the model; left out: vllm for ranks with gpus, else torch
    tensor: 2                     # tensor-parallel ranks of one replica; they share a node
    replicas:
      min: 1                      # copies that always serve; 0 frees the devices when nobody asks
      max: 2                      # copies under load
    autoscale:
      target_ongoing_requests: 8  # requests in flight that one replica should carry
    routing: least_connections    # how requests are spread over the replicas
    rollout: rolling              # how a new version takes over: rolling, blue_green or in_place
    limits:
      max_tokens: 1024            # most tokens of one answer
      queue: 128                  # requests that may wait before more are refused
"""


def schema_text() -> str:
    """The JSON Schema as the file beside the config holds it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def write_template(directory: Path, *, force: bool = False) -> list[Path]:
    """Write the config and its schema into a directory, which is made if need be; return the two files.

    Raises:
        RequestError: a file is already there and `force` is not set (nothing is changed then), or the
            directory cannot be written.
    """
    contents = {directory / SCHEMA_FILE: schema_text(), directory / CONFIG_FILE: TEMPLATE}
    there = [path for path in reversed(contents) if os.path.lexists(path)]
    if there and not force:
        names = " and ".join(str(path) for path in there)
        verb = "is" if len(there) == 1 else "are"
        raise RequestError(f"{names} {verb} already there; --force overwrites")
    for path in there:
        if path.is_dir():
            raise RequestError(f"{path} is a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            _replace(path, text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RequestError(f"{directory} cannot be written: {reason}") from error
    return list(reversed(contents))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
