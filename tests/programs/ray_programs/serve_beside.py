"""A Serve application that is nobody's of ours."""

from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0})
class Doubler:
    async def __call__(self, request: Request) -> dict[str, int]:
        return {"twice": 2 * int(request.query_params["n"])}


app = Doubler.bind()
