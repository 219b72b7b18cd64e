"""The real router, on the event loop that serves it, with one replica."""

import argparse
from pathlib import Path

from benchmarks.router_parts.load import info, model_path
from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint, StaticDirectory
from holdfast.router.router import Router


async def main(replica: str, folder: Path | None) -> None:
    model, path = (info().model, model_path()) if folder is None else (folder.name, folder)
    endpoint = ReplicaEndpoint(replica_id="r0", address=replica, model=model, model_path=str(path))
    router = await Router.start(RouterConfig(), LimitsConfig(), StaticDirectory([endpoint]))
    say(address=router.address)  # clients ask again until the replica is up
    await until_the_end()
    await router.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replica", help="address of its link")
    parser.add_argument("--model", type=Path, help="its folder; the bundled one where it has none")
    arguments = parser.parse_args()
    run(main(arguments.replica, arguments.model))
