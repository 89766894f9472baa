"""A Serve application that is nobody's of ours."""

import os

from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=1, max_constructor_retry_count=1, ray_actor_options={"num_cpus": 0})
class Doubler:
    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("asked to fail")

    async def __call__(self, request: Request) -> dict[str, int]:
        return {"twice": 2 * int(request.query_params["n"]), "pid": os.getpid()}


app = Doubler.bind()
broken = Doubler.bind(fails=True)
