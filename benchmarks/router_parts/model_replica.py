"""The real replica, with a model, behind its link; no Ray."""

import argparse
import asyncio

from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.worker.config import HealthConfig, ModelConfig, WorkerConfig
from holdfast.worker.replica.link import LinkServer
from holdfast.worker.replica.replica import Replica


async def main(model: str) -> None:
    config = WorkerConfig(model=ModelConfig(model=model), health=HealthConfig(self_check_every_s=0))
    replica = await asyncio.to_thread(Replica.start, config)
    server = await LinkServer.start(replica, replica_id="r0")
    say(address=server.address)
    await until_the_end()
    await server.stop()
    await asyncio.to_thread(replica.stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="its folder")
    run(main(parser.parse_args().model))
