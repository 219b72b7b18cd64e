"""The real router, on the event loop that serves it, with one replica."""

import argparse
import asyncio
from pathlib import Path

from benchmarks.router_parts.load import info, model_path
from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.cluster.serve.tracing import SCOPE, tracer_provider
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint, StaticDirectory
from holdfast.router.router import Router
from holdfast.worker.config import TelemetryConfig


async def until_up(address: str) -> None:
    """Returns once the router says that a replica is up."""
    host, port = address.split(":")
    answer = b""
    while b" 200 " not in answer:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.readline()
        writer.close()


async def main(replica: str, folder: Path | None, *, http: bool, otlp_endpoint: str | None) -> None:
    model, path = (info().model, model_path()) if folder is None else (folder.name, folder)
    endpoint = ReplicaEndpoint(replica_id="r0", address=replica, model=model, model_path=str(path))
    tracing = tracer_provider(TelemetryConfig(otlp_endpoint=otlp_endpoint), "router", "r0")
    router = await Router.start(
        RouterConfig(),
        LimitsConfig(),
        StaticDirectory([endpoint]),
        http_port=0 if http else None,
        tracer=None if tracing is None else tracing.get_tracer(SCOPE),
    )
    if http:
        await until_up(router.http_address)
    # Our clients ask again until the replica is up.
    say(address=router.http_address if http else router.address, grpc_address=router.address)
    await until_the_end()
    await router.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replica", help="address of its link")
    parser.add_argument("--model", type=Path, help="its folder; the bundled one where it has none")
    parser.add_argument("--http", action="store_true", help="say the address of the HTTP door")
    parser.add_argument("--otlp-endpoint", help="trace every request, and send the spans there")
    arguments = parser.parse_args()
    run(main(arguments.replica, arguments.model, http=arguments.http, otlp_endpoint=arguments.otlp_endpoint))
