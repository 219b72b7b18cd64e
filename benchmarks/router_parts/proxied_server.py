"""The bare server behind Ray Serve's own gRPC proxy: the same prepared chunks, from a deployment's generator.

Orders ask for the CPU time of the proxy and of the deployment's replica, which are processes of Ray's.
"""

import argparse
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import psutil

from benchmarks.free_port import pick_port
from benchmarks.router_parts.bare_server import Steps
from benchmarks.router_parts.load import prepared
from benchmarks.router_parts.orders import run, say, take_orders
from holdfast.cluster.config.config import ClusterConfig
from holdfast.cluster.serve.local import ray_connection
from holdfast.v1 import inference_pb2

SERVICER: Final = "holdfast.v1.inference_pb2_grpc.add_InferenceServicer_to_server"
_CPU_CLOCK: Final = 2


class Streams:
    """A deployment that answers each request with as many chunks as it asks for tokens, one a step."""

    def __init__(self, steps_per_s: float) -> None:
        self._steps_per_s = steps_per_s
        self._steps: Steps | None = None

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        self._steps = self._steps or Steps(self._steps_per_s)
        began = self._steps.began
        for index, chunk in enumerate(prepared(request.sampling_params.max_tokens)):
            await self._steps.after(began + index)
            yield inference_pb2.GenerateStreamResponse.FromString(chunk)


def cpu_s(kind: str) -> float:
    """Of the processes of that name below this one."""
    found = [child for child in psutil.Process().children(recursive=True) if kind in " ".join(child.cmdline()[:1])]
    assert found, f"no process is a {kind}"
    return sum(time.clock_gettime((~process.pid << 3) | _CPU_CLOCK) for process in found)


async def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    return {"proxy": cpu_s("ray::ProxyActor"), "replica": cpu_s("ray::ServeReplica")}


def serve_until_the_end(steps_per_s: float) -> None:
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    port = pick_port()
    with ray_connection(ClusterConfig(), 2):
        options = gRPCOptions(port=port, grpc_servicer_functions=[SERVICER], enable_reflection=False)
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=pick_port()), grpc_options=options)
        quiet: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}
        deployment = serve.deployment(
            Streams, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}, logging_config=quiet
        )
        serve.run(deployment.bind(steps_per_s), route_prefix="/")  # one that has a route is found without metadata
        say(address=f"127.0.0.1:{port}")
        run(take_orders(carry_out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps_per_s", type=float)
    serve_until_the_end(parser.parse_args().steps_per_s)
