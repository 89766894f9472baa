"""vLLM behind the gateway of a cluster: two ranks in one replica, and nothing left of them at the end."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.clusters import started
from tests.serve_apps.engine.conftest import Reference, save_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed"),
]

APP = """serve_apps:
  chat:
    model: {model}
    engine: vllm
    engine_kwargs: {{enforce_eager: true}}
    tensor: 2
    kv_cache: {{memory_gib: 0.25}}
    limits: {{context_length: 256, batch: 4}}
"""


def test_two_ranks_of_vllm_answer_like_generate(tmp_path: Path) -> None:
    # vLLM's kernels know no heads of fewer numbers than these.
    model = tmp_path / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    reference = Reference(save_llama(model, num_key_value_heads=2, **sizes))
    nodes = "nodes: [{name: head, cpus: 0}, {name: worker, cpus: 2}]"
    with started(tmp_path / "cluster", nodes, "storage: ./storage") as cluster:
        path = cluster.config_path
        path.write_text(path.read_text() + APP.format(model=model))
        served = cluster.shoal("serve", "--json")
        assert served.returncode == 0, served.stderr
        url = json.loads(served.stdout)["base_url"]
        # Its engine core and two workers too: what is started anew has another title.
        assert len(cluster.processes("shoal::Engine:chat:")) == 4
        assert cluster.processes("serve_apps.engine.vllm_preload"), "what has imported vLLM forks its engines"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        prompt = list(range(20, 60))
        expected = reference.tokenizer.decode(reference.generate(prompt, 16), skip_special_tokens=True)
        whole = client.completions.create(model="chat", prompt=prompt, max_tokens=16, temperature=0)
        stream = client.completions.create(
            model="chat", prompt=prompt, max_tokens=16, temperature=0, stream=True
        )
        for text in (whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)):
            assert text.rstrip("\ufffd") == expected.rstrip("\ufffd") or "\ufffd" in expected
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 40
        refused = httpx.post(f"{url}/embeddings", json={"model": "chat", "input": "a"}, timeout=30)
        assert refused.status_code == 400
        assert "engine: torch" in refused.json()["error"]["message"]
        logs = cluster.shoal("logs", "chat")
        assert logs.returncode == 0, logs.stderr
        for process in ("EngineCore", "Worker"):
            assert re.search(rf"^\[\w+\] .*{process}", logs.stdout, re.MULTILINE), (
                "what vLLM's own processes said"
            )
        end = time.monotonic() + 20
        # Two answers of 16 tokens to 40; beside them what the app was tried with before it was ready.
        while figure(url, "prompt_tokens_total") < 80 or figure(url, "generated_tokens_total") < 32:
            assert time.monotonic() < end, metrics_of(url)
            time.sleep(0.2)
        assert figure(url, "prompt_tokens_total") < 80 + 40
        assert figure(url, "generated_tokens_total") < 32 + 16
        page = metrics_of(url)
        for name in ("running_requests", "kv_cache_size_bytes"):
            assert f'shoal_engine_{name}{{app="chat",replica="' in page


def figure(url: str, name: str) -> float:
    """A counter of the app's engines; 0 while it is not shown."""
    found = re.search(rf'^shoal_engine_{name}{{app="chat"}} (\S+)$', metrics_of(url), re.MULTILINE)
    return float(found[1]) if found else 0.0


def metrics_of(url: str) -> str:
    return httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=30).text
