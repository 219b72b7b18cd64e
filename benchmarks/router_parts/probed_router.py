"""The real router with all of its APIs, and vLLM's engine protocol on a third port, on a loop that is probed.

It says its addresses by protocol, and answers the orders of a `LoopProbe`.
"""

import argparse
import sys
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.router_parts.load import info, model_path
from benchmarks.router_parts.loop_probe import LoopProbe
from benchmarks.router_parts.orders import run, say, take_orders
from benchmarks.router_parts.served_router import until_up
from benchmarks.static_directory import StaticDirectory
from holdfast.router.api.grpc import server
from holdfast.router.api.vllm.servicer import SERVICE, VllmEngineServicer
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import SWITCH_INTERVAL_S, Router
from holdfast.worker.process_memory import set_aside
from holdfast.worker.request import EngineLoad

LOAD = EngineLoad(num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=1, num_total_blocks=1)


async def main(replica: str, limits: LimitsConfig) -> None:
    config = RouterConfig(endpoint_picker=True)
    endpoint = ReplicaEndpoint(replica_id="r0", address=replica, model=info().model, model_path=str(model_path()))
    router = await Router.start(config, limits, StaticDirectory([endpoint]), http_port=0)
    await until_up(router, 1)
    engine = cast(Any, SimpleNamespace(load=LOAD, failure=None))
    servicer = VllmEngineServicer(router._request_processor, engine, cast(Any, info()), max_num_seqs=4)
    vllm = server.build_server({SERVICE: servicer}, config, limits)
    port = vllm.add_insecure_port("127.0.0.1:0")
    await vllm.start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    set_aside()  # as a router of a cluster does once it serves
    say(address=" ".join((router.address, router.http_address, f"127.0.0.1:{port}")))
    await take_orders(LoopProbe().carry_out)
    await vllm.stop(None)
    await router.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replica", help="address of its link")
    parser.add_argument("--limits", default="{}", help="JSON: limits by name")
    arguments = parser.parse_args()
    run(main(arguments.replica, LimitsConfig.model_validate_json(arguments.limits)))
