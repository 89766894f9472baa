"""What every vLLM engine imports, for the fork server that has imported vLLM (cluster/node/README.md).

Nothing is started, and no device is touched, by importing it. Where vLLM is not installed, whoever starts an
engine says so.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.metrics.loggers  # noqa: F401
