"""The real router, on the event loop that serves it, with one replica."""

import argparse

from benchmarks.router_parts.load import info, model_path
from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint, StaticDirectory
from holdfast.router.router import Router


async def main(replica: str) -> None:
    endpoint = ReplicaEndpoint(replica_id="r0", address=replica, model=info().model, model_path=str(model_path()))
    router = await Router.start(RouterConfig(), LimitsConfig(), StaticDirectory([endpoint]))
    say(address=router.address)  # clients ask again until the replica is up
    await until_the_end()
    await router.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replica", help="address of its link")
    arguments = parser.parse_args()
    run(main(arguments.replica))
