"""What only shows when sections are seen together, each mistake at its place."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.checks.config_checks import storage_problem
from cluster.config.checks.ground import Ground
from cluster.config.checks.parallel_checks import uneven_sizes
from cluster.config.loader import load_config, resolve_paths
from cluster.config.sections.cluster import NodeConfig
from cluster.errors import ConfigError
from tests.cluster.config.config_files import load, mistakes, position, write
from tests.pace import loops


def check(directory: Path, text: str, marker: str, path: str, *words: str) -> None:
    """The text has exactly one mistake: at the marker's place, for that path, with those words."""
    (found,) = mistakes(directory, text)
    assert ((found.line, found.column), found.path) == (position(text, marker), path)
    for word in words:
        assert word in found.message


def model_directory(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("nodes", "workers", "marker", "words"),
    [
        (
            "[{name: a, cpus: 4}]",
            "{min: 5}",
            "5}",
            ["5 workers of 1 CPU each", "hold 4 of them", "a (4 CPUs)"],
        ),
        (
            "[{name: a, cpus: 3, count: 2}]",
            "{min: 3, cpus: 2}",
            "3, cpus: 2}",
            ["3 workers of 2 CPUs", "hold 2"],
        ),
        ("[{name: a, cpus: 3, count: 2}]", "{cpus: 4}", "workers:", ["a worker of 4 CPUs", "hold none"]),
        ("[{name: a, gpus: 1}]", "{min: 2, gpus: 1}", "2, gpus", ["1 CPU and 1 GPU each", "hold 1 of them"]),
        ("[{name: a, cpus: 8}]", "{gpus: 1, cpus: 0}", "workers:", ["a worker of 1 GPU", "hold none"]),
    ],
)
def test_a_job_that_no_nodes_can_hold(
    nodes: str, workers: str, marker: str, words: list[str], tmp_path: Path
) -> None:
    job = f"  j:\n    batch: {{global: 30, micro: 1}}\n    workers: {workers}\n"
    text = f"cluster: {{nodes: {nodes}}}\ntrain_jobs:\n{job}"
    check(tmp_path, text, marker, "train_jobs.j.workers.min", "one worker wholly on one node", *words)


def test_a_job_that_just_fits_is_no_mistake(tmp_path: Path) -> None:
    nodes = "[{name: a, cpus: 3, gpus: 4}, {name: b, count: 2, cpus: 1, gpus: 1}]"
    load(tmp_path, f"cluster: {{nodes: {nodes}}}\ntrain_jobs: {{j: {{workers: {{min: 4, gpus: 1}}}}}}\n", [])
    load(tmp_path, "train_jobs: {j: {workers: {min: 32, cpus: 0}}}\n", ["train_jobs.j.batch.micro=1"])


sizes = st.integers(min_value=0, max_value=5)


@given(
    kinds=st.lists(st.tuples(st.integers(1, 3), sizes, sizes), min_size=1, max_size=3), cpus=sizes, gpus=sizes
)
def test_room_equals_filling_the_nodes_one_by_one(
    kinds: list[tuple[int, int, int]], cpus: int, gpus: int
) -> None:
    ground = Ground(
        tuple(NodeConfig(name=f"n{i}", count=c, cpus=x, gpus=g) for i, (c, x, g) in enumerate(kinds)),
        Path(),
    )
    if cpus == gpus == 0:
        assert ground.holds(cpus, gpus) is None
        return
    filled = 0
    for count, node_cpus, node_gpus in kinds:
        for _ in range(count):
            left_cpus, left_gpus = node_cpus, node_gpus
            while left_cpus >= cpus and left_gpus >= gpus:
                left_cpus, left_gpus, filled = left_cpus - cpus, left_gpus - gpus, filled + 1
    assert ground.holds(cpus, gpus) == filled


def test_fewer_workers_at_most_than_at_least(tmp_path: Path) -> None:
    text = "train_jobs:\n  j:\n    workers: {min: 3, max: 2}\n"
    check(tmp_path, text, "2}", "train_jobs.j.workers.max", "at least workers.min (3), was 2")
    text = "train_jobs:\n  j:\n    batch: {global: 30, micro: 8}\n    workers: {min: 3, max: 2, cpus: 0}\n"
    found = [mistake.path for mistake in mistakes(tmp_path, text)]
    assert sorted(found) == ["train_jobs.j.batch.global", "train_jobs.j.workers.max"]


def test_a_global_batch_that_some_numbers_of_workers_cannot_share(tmp_path: Path) -> None:
    job = "    parallel: {strategy: fsdp}\n    batch: {global: 32, micro: 8}\n    workers: {min: 1, max: 6}\n"
    text = f"train_jobs:\n  j:\n{job}"
    words = ["micro (8) × workers at every number of workers (1 to 6)", "32 is none at 3, 5, 6"]
    check(tmp_path, text, "32,", "train_jobs.j.batch.global", *words)
    text = "train_jobs:\n  j: {batch: {global: 30, micro: 8}}\n"
    check(tmp_path, text, "30,", "train_jobs.j.batch.global", "multiple of batch.micro (8)")
    text = "train_jobs:\n  j: {workers: {min: 3, cpus: 0}}\n"
    check(tmp_path, text, "j:", "train_jobs.j.batch.global", "(3); 32 is none at 3")


@given(micro_batches=st.integers(1, 60), least=st.integers(1, 20), more=st.integers(0, 20))
def test_uneven_sizes_equal_trying_every_size(micro_batches: int, least: int, more: int) -> None:
    found = uneven_sizes(micro_batches, least, least + more)
    tried = [n for n in range(least, least + more + 1) if micro_batches / n != micro_batches // n]
    assert found == tried[:9]


def test_a_huge_range_of_workers_is_answered_at_once(tmp_path: Path) -> None:
    text = "train_jobs: {j: {parallel: {strategy: fsdp}, workers: {max: 1000000000000000}}}\n"
    (found,) = mistakes(tmp_path, text)
    assert "32 is none at 3, 5, 6, 7, 8, 9, 10, 11, …" in found.message
    assert loops(lambda: mistakes(tmp_path, text)) < 20


@pytest.mark.parametrize(
    ("job", "marker", "path", "words"),
    [
        (
            "steps: 10, optimizer: {warmup_steps: 4, decay_steps: 7}",
            "7}",
            "optimizer.decay_steps",
            "at most steps - warmup_steps (6), was 7",
        ),
        (
            "data: {sequence_length: 4096}",
            "4096",
            "data.sequence_length",
            "max_position_embeddings (2048), was 4096",
        ),
        (
            "model: {hidden_size: 100, num_heads: 8}",
            "100",
            "model.hidden_size",
            "a multiple of num_heads (8), was 100",
        ),
        ("model: {num_kv_heads: 3}", "3}", "model.num_kv_heads", "should divide num_heads (8), was 3"),
        ("data: {source: ./no.parquet}", "./no", "data.source", "no.parquet` does not exist"),
        ("data: {tokenizer: no}", "no}", "data.tokenizer", "no` does not exist"),
        ("model: {directory: no}", "no}", "model.directory", "no` does not exist"),
        ("model: {directory: shoal.yaml}", "shoal", "model.directory", "is not a directory"),
        ("model: {directory: .}", ".}", "model.directory", "holds no config.json"),
    ],
)
def test_values_of_a_job_that_do_not_agree(
    job: str, marker: str, path: str, words: str, tmp_path: Path
) -> None:
    text = f"train_jobs:\n  j: {{{job}}}\n"
    check(tmp_path, text, marker, f"train_jobs.j.{path}", words)


def test_the_sizes_of_a_directory_count_where_a_job_starts_from_one(tmp_path: Path) -> None:
    model_directory(tmp_path / "m", model_type="llama", num_attention_heads=6, max_position_embeddings=128)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / name).touch()
    job, app = "j: {model: {directory: m}, publish: p}", "a: {model: p, tensor: 2, cpus: 0}"
    text = f"train_jobs:\n  {job}\nserve_apps:\n  {app}\n"
    check(tmp_path, text, "j:", "train_jobs.j.data.sequence_length", "(128), was 256")
    load(tmp_path, text, ["train_jobs.j.data.sequence_length=128"])
    load(tmp_path, text, ["train_jobs.j.data.sequence_length=128", "serve_apps.a.tensor=3"])
    found = mistakes(tmp_path, text, ["train_jobs.j.data.sequence_length=128", "serve_apps.a.tensor=4"])
    assert "should divide the 6 attention heads of the model of train_jobs.j, was 4" in found[0].message


@pytest.mark.parametrize("content", [b"not json", b"\xff", b"[" * 100_000, b"[]"])
def test_a_model_directory_with_a_broken_config_is_a_mistake(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes(content)
    check(
        tmp_path, "serve_apps:\n  a: {model: ./m}\n", "./m", "serve_apps.a.model", "holds a config.json that"
    )


JOB = (
    "train_jobs:\n  j: {publish: lm, model: {num_heads: 8, num_kv_heads: 4, max_position_embeddings: 512}}\n"
)


@pytest.mark.parametrize(
    ("app", "marker", "path", "words"),
    [
        (
            "model: lm, tensor: 3, cpus: 0",
            "3,",
            "tensor",
            "should divide the 8 attention heads of the model of train_jobs.j",
        ),
        (
            "model: lm, tensor: 8, cpus: 0",
            "8, cpus",
            "tensor",
            "should divide the 4 key and value heads of the model of",
        ),
        (
            "model: lm, tensor: 4",
            "4}",
            "tensor",
            "4 ranks needs 4 CPUs on one node; none of the nodes head (0 CPUs), ",
        ),
        (
            "model: lm, engine: torch, gpus: 1",
            "a:",
            "tensor",
            "a replica of 1 rank needs 1 CPU and 1 GPU on one node",
        ),
        (
            "model: lm, tensor: 2, replicas: {min: 3}",
            "3}",
            "replicas.min",
            "3 replicas of 2 CPUs each cannot be placed",
        ),
        ("model: lm, replicas: {min: 2, max: 1}", "1}", "replicas.max", "at least replicas.min (2), was 1"),
        ("model: lm, limits: {context_length: 513}", "513", "limits.context_length", "at most 512"),
        (
            "model: lm, limits: {prefill_ms: 0}",
            "0}",
            "limits.prefill_ms",
            "should be a number above 0, or null, was 0",
        ),
        ("model: lm, limits: {prefill_ms: .inf}", ".inf", "limits.prefill_ms", "should be"),
        ("model: lm, pipeline: 2, cpus: 0", "2,", "pipeline", "should be 1 with engine: torch, was 2"),
        (
            "model: lm, engine_kwargs: {gpu_memory_utilization: 0.5}",
            "0.5",
            "engine_kwargs.gpu_memory_utilization",
            "heartbeat_s, least_step_ms, start_timeout_s, step_timeout_s, was `gpu_memory_utilization`",
        ),
        ("model: lm, gpus: -1", "-1", "gpus", "at least 0"),
        ("model: lm, tools: hermess", "hermess", "tools", "was `hermess`; did you mean `hermes`?"),
        ("model: lm, reasoning: granite", "granite", "reasoning", "knows deepseek_r1, qwen3 and none"),
        # JOB's model has 4 layers of 4 key and value heads of 32 numbers: 4 KiB a token in fp32.
        (
            "model: lm, kv_cache: {memory_gib: 0.0019}",
            "0.0019",
            "kv_cache.memory_gib",
            "of the model of train_jobs.j on each rank, but one request may have 512: give 0.00196",
        ),
        ("model: ml", "ml}", "model", "nothing publishes a model `ml`: no job of this file does"),
        ("model: other@3", "other", "model", "(published here: lm)"),
        ("model: lm@", "lm@", "model", "should be NAME@VERSION"),
        ("model: models/lm", "models/lm", "model", "or a directory (./… or /…)"),
        ("model: LM@latest", "LM@", "model", "should be NAME@VERSION"),
        ("model: ./no", "./no", "model", "does not exist"),
        ("model: /no/where", "/no/where", "model", "`/no/where` does not exist"),
    ],
)
def test_apps_that_cannot_serve(app: str, marker: str, path: str, words: str, tmp_path: Path) -> None:
    check(tmp_path, JOB + f"serve_apps:\n  a: {{{app}}}\n", marker, f"serve_apps.a.{path}", words)


def test_an_engine_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = JOB + "serve_apps:\n  a: {model: lm, engine: vllm}\n"
    check(tmp_path, text, "vllm", "serve_apps.a.engine", "pip install 'shoal[vllm]'")


GPUS = "cluster: {nodes: [{name: a, cpus: 8, gpus: 2}]}\n"


@pytest.mark.parametrize(
    ("app", "engine"),
    [
        ("", "torch"),
        ("gpus: 0", "torch"),
        ("gpus: 1", "vllm"),
        ("engine: torch, gpus: 1", "torch"),
        ("engine: vllm", "vllm"),
    ],
)
def test_ranks_with_gpus_run_in_vllm_unless_the_app_says_otherwise(
    app: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    config = load(tmp_path, GPUS + JOB + f"serve_apps:\n  a: {{model: lm, {app}}}\n").config.serve_apps["a"]
    assert config.engine == engine
    # What is deployed says it, so that another default of a later Shoal changes nothing that runs.
    assert json.loads(config.model_dump_json())["engine"] == engine


def test_gpus_without_vllm_say_what_to_install_or_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = mistakes(tmp_path, GPUS + JOB + "serve_apps:\n  a: {model: lm, gpus: 1}\n")
    assert found.path == "serve_apps.a.engine"
    assert "an app whose ranks have GPUs runs in vLLM unless it says engine: torch" in found.message
    assert "pip install 'shoal[vllm]'" in found.message
    load(tmp_path, GPUS + JOB + "serve_apps:\n  a: {model: lm, gpus: 1, engine: torch}\n")


def test_vllm_takes_no_time_for_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    text = JOB + "serve_apps:\n  a: {model: lm, engine: vllm, limits: {prefill_ms: 50}}\n"
    words = "has no effect with engine: vllm, whose steps are bounded by limits.batched_tokens; was 50"
    check(tmp_path, text, "50}}", "serve_apps.a.limits.prefill_ms", words)


def test_the_nearest_published_model_is_named(tmp_path: Path) -> None:
    (found,) = mistakes(
        tmp_path, "train_jobs: {j: {publish: stdlib-lm}}\nserve_apps: {a: {model: stdlib-ml}}\n"
    )
    assert "did you mean `stdlib-lm`?" in found.message


def test_models_that_lie_in_the_storage_can_be_served(tmp_path: Path) -> None:
    text = "cluster: {storage: ./store}\nserve_apps: {a: {model: lm@latest, tensor: 2}}\n"
    assert "nothing publishes a model `lm`" in mistakes(tmp_path, text)[0].message
    model_directory(tmp_path / "store" / "models" / "lm" / "9", num_attention_heads=3)
    model_directory(tmp_path / "store" / "models" / "lm" / "10", num_attention_heads=4, num_key_value_heads=2)
    load(tmp_path, text)
    (found,) = mistakes(tmp_path, text, ["serve_apps.a.tensor=4", "cluster.nodes.1.cpus=4"])
    assert f"the 2 key and value heads of `{tmp_path}/store/models/lm/10`" in found.message


def test_models_in_a_storage_elsewhere_are_not_looked_for(tmp_path: Path) -> None:
    load(tmp_path, "cluster: {storage: 's3://bucket/x'}\nserve_apps: {a: {model: lm}}\n")


def test_two_nodes_of_one_name_after_counting(tmp_path: Path) -> None:
    text = "cluster:\n  nodes:\n    - {name: w, count: 3}\n    - {name: v}\n    - {name: w-2, cpus: 1}\n"
    check(tmp_path, text, "w-2", "cluster.nodes.2.name", "two nodes are called `w-2`: entries 0 and 2")


@pytest.mark.parametrize(
    ("gateway", "dashboard", "clash"),
    [
        ("{port: 9000}", "{port: 9000}", True),
        ("{host: 127.0.0.9, port: 9000}", "{host: 127.0.0.9, port: 9000}", True),
        ("{host: 127.0.0.9, port: 9000}", "{host: 0.0.0.0, port: 9000}", True),
        ("{host: localhost, port: 9000}", "{host: 127.0.0.1, port: 9000}", True),
        ("{host: 127.0.0.8, port: 9000}", "{host: 10.0.0.1, port: 9000}", False),
        ("{port: 9000}", "{port: 9001}", False),
        ("{}", "{}", False),
    ],
)
def test_the_two_endpoints_cannot_share_an_address(
    gateway: str, dashboard: str, clash: bool, tmp_path: Path
) -> None:
    text = f"cluster:\n  gateway: {gateway}\n  dashboard: {dashboard}\n"
    if not clash:
        load(tmp_path, text)
        return
    (found,) = mistakes(tmp_path, text)
    assert (found.line, found.path) == (3, "cluster.dashboard.port")
    assert "cannot both listen on port 9000" in found.message


@pytest.mark.parametrize(
    ("other", "proxy", "clash"),
    [
        ("gateway: {port: 9000}", "{port: 9000}", False),  # the proxy's address is no node's
        ("gateway: {host: 127.0.0.9, port: 9000}", "{host: 127.0.0.9, port: 9000}", True),
        ("gateway: {host: 127.0.0.9, port: 9000}", "{host: 127.0.0.8, port: 9000}", False),
        ("dashboard: {host: 127.0.0.9, port: 9000}", "{host: 127.0.0.9, port: 9000}", True),
        ("dashboard: {host: 0.0.0.0, port: 9000}", "{port: 9000}", True),
        ("dashboard: {port: 9000}", "{port: 9000}", False),
    ],
)
def test_serves_proxy_has_an_address_to_itself(other: str, proxy: str, clash: bool, tmp_path: Path) -> None:
    text = f"cluster:\n  {other}\n  serve_proxy: {proxy}\n"
    if not clash:
        load(tmp_path, text)
        return
    (found,) = mistakes(tmp_path, text)
    assert (found.line, found.path) == (3, "cluster.serve_proxy.port")
    assert "Serve's proxy cannot both listen on port 9000" in found.message


def test_serves_proxy_stays_on_loopback(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "10.0.0.1", "somewhere"):
        text = f"cluster:\n  serve_proxy:\n    host: {host}\n"
        check(tmp_path, text, host, "cluster.serve_proxy.host", "loopback", "asks nobody for a key")


def test_the_ports_of_tokens_are_nobody_elses(tmp_path: Path) -> None:
    for port, clash in ((20005, True), (20011, False)):
        text = f"cluster:\n  gateway: {{token_ports: 20000-20010, port: {port}}}\n"
        if not clash:
            load(tmp_path, text)
            continue
        (found,) = mistakes(tmp_path, text)
        assert found.path == "cluster.gateway.token_ports"
        assert "holds port 20005, where the gateway listens" in found.message


def test_a_storage_that_is_a_file_or_below_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for storage in ("./file", "./file/below", f"file://{tmp_path}/file"):
        text = f"cluster:\n  storage: {storage}\n"
        check(tmp_path, text, storage, "cluster.storage", "cannot be written", "is not a directory")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_storage_where_even_root_cannot_write(tmp_path: Path) -> None:
    text = "cluster:\n  storage: /proc/shoal/x\n"
    check(tmp_path, text, "/proc/shoal", "cluster.storage", "`/proc/shoal/x` cannot be written")


def test_a_storage_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for directory in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        directory.chmod(directory.stat().st_mode | 0o055)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        assert str(storage_problem(closed / "x")).endswith("/closed` (Permission denied)")
    finally:
        if is_root:
            os.seteuid(0)


def test_looking_at_the_storage_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, "cluster: {storage: ./a/b/c}\n")
    load_config(path)
    assert sorted(tmp_path.rglob("*")) == [path]


def test_mistakes_in_values_do_not_hide_the_rest_and_bring_no_false_ones(tmp_path: Path) -> None:
    text = """\
cluster:
  nodes: [{name: a, cpus: many}]
train_jobs:
  j:
    parallel: {stragety: fsdp}
    workers: {min: 3, max: 2}
    model: {num_haeds: 3, hidden_size: 257}
    batch: {global: 7, micro: x}
    publish: 5
serve_apps:
  a: {model: lm, tensor: 64, replicas: {min: 2, max: 1}}
"""
    found = [mistake.path for mistake in mistakes(tmp_path, text)]
    assert found == [
        "cluster.nodes.0.cpus",
        "train_jobs.j.parallel.stragety",
        "train_jobs.j.workers.max",
        "train_jobs.j.model.num_haeds",
        "train_jobs.j.batch.micro",
        "train_jobs.j.publish",
        "serve_apps.a.replicas.max",
    ]


def test_commands_that_must_go_on_can_leave_these_checks_out(tmp_path: Path) -> None:
    path = write(tmp_path, "train_jobs: {j: {workers: {min: 50}, data: {source: gone}}}\n")
    assert load_config(path, across=False).config.train_jobs["j"].workers.min == 50


def test_paths_are_taken_from_the_files_directory_and_uris_stay(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
cluster: {storage: ./store}
train_jobs:
  a: {data: {source: data, tokenizer: ../t}, model: {directory: m}}
  b: {data: {source: "s3://bucket/x"}}
  c: {}
serve_apps:
  reg: {model: lm@latest}
  here: {model: ./m}
  up: {model: ../m}
  top: {model: /m}
""",
    )
    config = load_config(path, across=False).config
    raw = config.model_dump()
    resolved = resolve_paths(config, tmp_path)
    assert config.model_dump() == raw
    assert resolved.cluster.storage == str(tmp_path / "store")
    job = resolved.train_jobs["a"]
    assert (job.data.source, job.data.tokenizer) == (str(tmp_path / "data"), str(tmp_path.parent / "t"))
    assert job.model.directory == str(tmp_path / "m")
    assert [resolved.train_jobs[name].source for name in "bc"] == ["s3://bucket/x", "python-stdlib"]
    models = [app.model for app in resolved.serve_apps.values()]
    assert models == ["lm@latest", str(tmp_path / "m"), str(tmp_path.parent / "m"), "/m"]
    assert resolve_paths(resolved, Path("/elsewhere")) == resolved


def test_a_relative_file_name_gives_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "cluster: {}\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_config(Path("shoal.yaml"))
    assert loaded.path == tmp_path / "shoal.yaml"
    assert loaded.resolved.cluster.storage == str(tmp_path / "shoal-storage")


def test_the_order_of_the_checks_never_matters_for_the_order_of_the_mistakes(tmp_path: Path) -> None:
    parts = [
        "cluster: {storage: /proc/x}\n",
        "train_jobs: {j: {workers: {min: 50, max: 2}, steps: 0}}\n",
        "serve_apps: {a: {model: x, tensor: 50}}\n",
    ]
    for order in itertools.permutations(parts):
        found = mistakes(tmp_path, "".join(order))
        lines = [mistake.line for mistake in found]
        assert lines == sorted(lines)  # type: ignore[type-var]
        assert len(found) == 6


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("token_ports", "20010-20000", "the lower one first"),
        ("token_ports", "20000-99999", "1 to 65535"),
        ("token_ports", "0", "1 to 65535"),
        ("token_ports", "many", "A-B"),
        ("cors", "[https://page.example/path]", "an origin"),
        ("cors", "[page.example]", "an origin"),
        ("metrics_from", "[10.0.0.1/8]", "10.0.0.0/8"),
        ("metrics_from", "[prometheus]", "an IP address"),
        ("keepalive_s", "-1", "0"),
        ("keepalive_s", "0.01", "at least 0.1"),
        ("keepalive_s", "soon", "number"),
        ("unknown_fields", "drop", "ignore"),
    ],
)
def test_what_a_gateway_could_not_do_is_found_before_it_starts(
    key: str, value: str, words: str, tmp_path: Path
) -> None:
    (found,) = mistakes(tmp_path, f"cluster:\n  gateway:\n    {key}: {value}\n")
    assert found.path.startswith(f"cluster.gateway.{key}")
    assert words in found.message


def test_a_gateways_ports_and_origins_are_taken(tmp_path: Path) -> None:
    text = "cluster:\n  gateway: {token_ports: 20000-20010, cors: ['*', 'https://page.example:8443']}\n"
    gateway = load(tmp_path, text).resolved.cluster.gateway
    assert gateway.token_ports == "20000-20010"
    one = load(tmp_path, "cluster:\n  gateway: {token_ports: 20000}\n").resolved.cluster.gateway
    assert one.token_ports == "20000"
    assert gateway.cors == ["*", "https://page.example:8443"]


def test_who_runs_one_job_need_not_mend_the_others(tmp_path: Path) -> None:
    text = (
        "train_jobs:\n  good: {steps: 3}\n  bad: {steps: 0, optimizer: 3}\n  bad.too: {workers: {min: 99}}\n"
        "serve_apps:\n  app: {model: nobody, tensor: x}\n"
    )
    path = tmp_path / "shoal.yaml"
    path.write_text(text)
    config = load_config(path, scope="train_jobs.good", others=False).config
    assert config.train_jobs["good"].steps == 3
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["steps=x"], "train_jobs.good", others=False)
    assert [each.path for each in caught.value.mistakes] == ["train_jobs.good.steps"]
    with pytest.raises(ConfigError) as caught:
        load_config(path, scope="train_jobs.bad", others=False)
    found = {each.path for each in caught.value.mistakes}
    assert found == {"train_jobs.bad.steps", "train_jobs.bad.optimizer"}
    with pytest.raises(ConfigError) as caught:
        load_config(path, scope="train_jobs.good")
    assert len(caught.value.mistakes) >= 4


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run.sh", "`run.sh` is a shell script, and what runs is Python"),
        ("torn.py", "`torn.py` is no Python: '(' was never closed (line 2)"),
        ("../outside.py", "which is what travels to the nodes"),
        ("lib", "`lib` is a directory"),
        ("nowhere.py", "`nowhere.py` does not exist"),
    ],
)
def test_a_script_that_cannot_run_is_told_before_anything_starts(
    script: str, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    (folder / "lib").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\nexec python train.py\n")
    (folder / "torn.py").write_text("import os\nprint(\n")
    (tmp_path / "outside.py").write_text("")
    text = f"train_jobs: {{j: {{task: script, script: {script}}}}}\n"
    check(folder, text, script, "train_jobs.j.script", words)


def test_nodes_that_others_start_are_not_known_to_the_file(tmp_path: Path) -> None:
    job = "train_jobs: {j: {workers: {min: 500, max: 500}, batch: {global: 4000}, accelerator: H100-SXM}}\n"
    assert load(tmp_path, f"cluster: {{provider: existing}}\n{job}").config.cluster.known_nodes == ()
    listed = f"cluster: {{provider: existing, nodes: [{{name: a, cpus: 4}}]}}\n{job}"
    room, accelerator = mistakes(tmp_path, listed)
    assert "the nodes a (4 CPUs) hold 4 of them" in room.message
    assert "no entry of cluster.nodes has an `accelerator`" in accelerator.message


def test_what_is_of_one_provider_alone(tmp_path: Path) -> None:
    check(
        tmp_path,
        "cluster: {address: 'auto'}\n",
        "'auto'",
        "cluster.address",
        "is for `provider: existing`",
    )
    (found,) = mistakes(tmp_path, "cluster: {provider: existing, dashboard: {port: 8265}}\n")
    assert (found.path, "cannot be chosen" in found.message) == ("cluster.dashboard", True)
    for address in ("somewhere", "http://192.0.2.1:8265", "ray://192.0.2.1:10001", "192.0.2.1:"):
        (found,) = mistakes(tmp_path, f"cluster: {{provider: existing, address: '{address}'}}\n")
        assert 'should be "auto" or HOST:PORT of Ray\'s control store' in found.message
    for address in ("auto", "192.0.2.1:6379", "head.example.org:6379", "'[2001:db8::1]:6379'"):
        load(tmp_path, f"cluster: {{provider: existing, address: {address}}}\n")
