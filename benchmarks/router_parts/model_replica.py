"""The real replica, with a model, behind its link; no Ray."""

import argparse
import asyncio
import json

from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import keyword_layer
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.replica import Replica


async def main(model: str, settings: dict[str, object]) -> None:
    given = {"model": model, "self_check_every_s": 0, **settings}
    config = load_config(keyword_layer(HoldfastConfig, given, "arguments")).config
    replica = await asyncio.to_thread(Replica.start, config.worker)
    server = await LinkServer.start(replica, replica_id="r0")
    say(address=server.address)
    await until_the_end()
    await server.stop()
    await asyncio.to_thread(replica.stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="its folder")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: settings by their last name")
    arguments = parser.parse_args()
    run(main(arguments.model, arguments.settings))
