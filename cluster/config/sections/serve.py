"""The `serve_apps` section: which model is served, by how many replicas of how many ranks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cluster.config.sections.section import Section

STANDBY = 12
"""For a load that rises eightfold at once, and half as many for what waits meanwhile."""


class ReplicasConfig(Section):
    """How many copies of the model serve requests."""

    min: int = Field(default=1, ge=0)
    """Fewest replicas. 0 frees the devices when nobody asks; the next request waits for one to start."""
    max: int | None = Field(default=None, ge=1)
    """Most replicas under load. Default: min, at least 1."""
    standby: int | None = Field(default=None, ge=1, le=1000)
    """Processes of Serve that stand by for the next replicas, each with some 125 MiB of memory and no device.
    A load that rises by so many replicas at once waits for no process; max bounds them. Default: 12."""

    def standing_by(self, size: int) -> int:
        """How many are to stand by beside so many that serve: one at least, should one of those be lost."""
        return max(1, min(STANDBY if self.standby is None else self.standby, self.most - size))

    @property
    def most(self) -> int:
        return max(1, self.min) if self.max is None else self.max


class AutoscaleConfig(Section):
    """When replicas are added and taken away; of several targets the one that asks for most counts."""

    target_ongoing_requests: float = Field(default=8.0, gt=0)
    """Requests in flight that one replica should carry."""
    target_queue_length: float | None = Field(default=None, gt=0)
    """Requests that may wait, in the gateway or a replica, for each replica."""
    target_kv_cache_use: float | None = Field(default=None, gt=0, le=1)
    """Part of the KV cache that requests should hold, on average over the replicas."""
    target_first_token_s: float | None = Field(default=None, gt=0)
    """Seconds within which 95 of 100 requests should have their first token."""
    look_back_period_s: float = Field(default=0.0, ge=0, le=600)
    """Seconds over whose mean requests in flight are counted, so that chance alone adds no replica. While
    replicas run as many as they have places for (limits.batch), those of this moment count. 0: always."""
    upscale_delay_s: float = Field(default=1.0, ge=0)
    """Seconds that the load must last before a replica is added."""
    downscale_delay_s: float = Field(default=30.0, ge=0)
    """Seconds that the load must be gone before a replica is taken away."""
    idle_s: float = Field(default=60.0, ge=0)
    """Seconds without a request before the last replica is taken away, where replicas.min is 0."""


class UpdateConfig(Section):
    """How a new version is tried out before and while it takes over."""

    probes: list[str] = Field(default_factory=lambda: ["Hello"])
    """Prompts that every new version must answer before it gets a request."""
    probe_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that the answer to a probe may take."""
    ready_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds in which each new replica must be ready."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """Part of its requests that may fail; beyond it the old version comes back."""
    watch_s: float = Field(default=60.0, ge=0)
    """Seconds after a rollout for which its errors are counted."""
    hold_s: float = Field(default=60.0, ge=0)
    """Seconds for which blue_green keeps the old replicas, for an instant way back."""


class LimitsConfig(Section):
    """Bounds that keep one request, or many, from hurting the others."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer, also of a request that names no number. Default: what is left of the
    context after the prompt."""
    over_max_tokens: Literal["refuse", "clamp"] = "refuse"
    """What happens to a request that asks for more than max_tokens."""
    queue: int = Field(default=128, ge=1)
    """Requests that may wait for an app before more are refused."""
    batch: int = Field(default=32, ge=1)
    """Requests that one replica runs at once."""
    batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that one step of the engine computes; a longer prompt is read in several, beside the
    others' answers. Default: 2048 (torch), vLLM's own (vllm)."""
    prefill_ms: float | None = Field(default=None, gt=0)
    """Milliseconds that a step may take for prompts beside running answers, which are held up by as much
    (torch); smaller keeps answers flowing, larger reads prompts sooner. Default: 50."""
    context_length: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and answer together. Default: what the model was made for."""
    body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Largest request body."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a request that is not done is ended."""


class KvCacheConfig(Section):
    """Where the keys and values of the requests' tokens are kept."""

    memory_gib: float | None = Field(default=None, gt=0)
    """GiB a rank. Default: what a full batch can need, at most 4 on a CPU (torch), vLLM's own (vllm)."""
    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens of one block, the least that two requests share. Default: 32 (torch), vLLM's own (vllm)."""
    prefix_caching: bool = True
    """Whether a prompt that begins like an earlier one takes over what was computed for that."""


def engine_for(gpus: int) -> Literal["torch", "vllm"]:
    """The engine of an app that names none, by the GPUs that a rank has."""
    return "vllm" if gpus else "torch"


class ServeAppConfig(Section):
    """One serving app; its name is the `model` of OpenAI requests."""

    model: str = Field(min_length=1)
    """NAME@VERSION, NAME@latest or NAME@ALIAS of the registry, or a Hugging Face directory (./… or /…)."""
    gpus: int = Field(default=0, ge=0)
    """GPUs a rank."""
    engine: Literal["torch", "vllm"] = Field(default_factory=lambda known: engine_for(known.get("gpus", 0)))
    """What runs the model: Shoal's engine over transformers' models, or vLLM (pip install 'shoal[vllm]').
    Default: vllm where a rank has GPUs, else torch."""
    tools: str | None = None
    """How the model writes calls of tools: hermes, llama3_json, mistral, pythonic, qwen3_coder (with engine:
    vllm any of vLLM's tool parsers), or none. Default: by its chat template, where that is plain."""
    reasoning: str | None = None
    """How the model writes its reasoning: deepseek_r1, qwen3 (with engine: vllm any of vLLM's reasoning
    parsers), or none. Default: by its chat template."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the engine that no other key here gives: of vLLM's AsyncEngineArgs (vllm);
    step_timeout_s, start_timeout_s, heartbeat_s, least_step_ms (torch)."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of one replica; all of them on one node."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages of one replica, each of `tensor` ranks; with engine: vllm."""
    cpus: int = Field(default=1, ge=0)
    """CPUs a rank."""
    accelerator: str | None = Field(default=None, min_length=1)
    """The only kind of node its replicas run on, as cluster.nodes name it. Default: any."""
    priority: int = 0
    """Apps of a greater priority have devices first."""
    weight: float = Field(default=1.0, gt=0)
    """Share of contended devices among apps of one priority: an app of weight 2 is due twice as much."""
    replicas: ReplicasConfig = ReplicasConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    routing: Literal["round_robin", "least_connections", "weighted", "response_time", "prefix"] = (
        "least_connections"
    )
    """How requests are spread over the replicas."""
    rollout: Literal["rolling", "blue_green", "in_place"] = "rolling"
    """How a new version takes over: replica by replica (rolling), all at once from a second full set of
    replicas (blue_green), or as other weights in the replicas that run (in_place: a short pause)."""
    update: UpdateConfig = UpdateConfig()
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    kv_cache: KvCacheConfig = KvCacheConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline
