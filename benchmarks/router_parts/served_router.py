"""The real router, on the event loop that serves it, with one replica or several."""

import argparse
import asyncio
from pathlib import Path

from benchmarks.router_parts.load import info, model_path
from benchmarks.router_parts.orders import run, say, until_the_end
from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.serve.member_process import SCOPE, tracer_provider
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.worker.config import TelemetryConfig


async def until_up(router: Router, num_replicas: int) -> None:
    """Returns once so many replicas are up."""
    while sum(len(demand.replicas) for demand in router.demands()) < num_replicas:
        await asyncio.sleep(0.02)


async def main(replica: str, folder: Path | None, *, http: bool, otlp_endpoint: str | None) -> None:
    model, path = (info().model, model_path()) if folder is None else (folder.name, folder)
    endpoints = [
        ReplicaEndpoint(replica_id=f"r{number}", address=address, model=model, model_path=str(path))
        for number, address in enumerate(replica.split(","))
    ]
    tracing = tracer_provider(TelemetryConfig(otlp_endpoint=otlp_endpoint), "router", "r0")
    router = await Router.start(
        RouterConfig(),
        LimitsConfig(),
        StaticDirectory(endpoints),
        http_port=0 if http else None,
        tracer=None if tracing is None else tracing.get_tracer(SCOPE),
    )
    await until_up(router, len(endpoints))
    say(address=router.http_address if http else router.address, grpc_address=router.address)
    await until_the_end()
    await router.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replica", help="address of its link; of several, with commas")
    parser.add_argument("--model", type=Path, help="its folder; the bundled one where it has none")
    parser.add_argument("--http", action="store_true", help="say the address of the HTTP API")
    parser.add_argument("--otlp-endpoint", help="trace every request, and send the spans there")
    arguments = parser.parse_args()
    run(main(arguments.replica, arguments.model, http=arguments.http, otlp_endpoint=arguments.otlp_endpoint))
