"""Command `holdfast demo`: a local cluster, seen at work in under a minute."""

import asyncio
import sys
import time
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.demo.loss import pids_of, stream_with_a_loss
from holdfast.cluster.demo.streams import display, figures, stream_all
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.app import REPLICA
from holdfast.cluster.serve.models import application_name
from holdfast.cluster.serve.serving import serving
from holdfast.worker.config import ParallelConfig
from holdfast.worker.sampling_params import SamplingParams


def demo(
    *,
    blackout: Annotated[
        bool, Parameter(negative=(), help="kill every process of the cluster, not one replica, and start it again")
    ] = False,
    page: Annotated[
        bool, Parameter(negative=(), help="serve a page to talk to it, where replicas can be killed, until Ctrl-C")
    ] = False,
) -> int:
    """Start a local cluster, stream four prompts at once over gRPC, print the figures, and stop it."""
    if page:
        return _serve_page()
    from holdfast.cluster.commands.demo import PARAMS, PROMPTS, main
    from holdfast.cluster.demo import loss as dark

    return dark.run(PROMPTS, PARAMS) if blackout else main()


def _serve_page() -> int:
    """A cluster of `holdfast serve` whose page has a button for each replica that kills it."""
    from holdfast.cluster.commands.serve import run
    from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
    from holdfast.router.config import RouterConfig

    config = HoldfastConfig(cluster=ClusterConfig(replicas=2), router=RouterConfig(killable=True))
    print(f"the page: http://127.0.0.1:{config.cluster.http_port}/ once it is ready; its buttons Kill end a replica")
    return run(config)


PROMPTS: Final = ("The capital of France is", "The months of the year are", "The alphabet:", "Once upon a time")
PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=96)


def main() -> int:
    """Runs the demo; 1 if the loss of a replica has changed a stream. Raises what `serving` and the client raise."""
    started_s = time.monotonic()
    config = HoldfastConfig(cluster=ClusterConfig(replicas=2, port=0), parallel=ParallelConfig(tensor_parallel_size=2))
    console = Console(file=sys.stdout)  # this very one, whatever becomes of the name below
    with ExitStack() as stack:
        with progress(sys.stderr) as report:
            cluster = stack.enter_context(serving(config, report))
        addresses = " and ".join(cluster.routers)
        console.print(f"up after {time.monotonic() - started_s:.1f} s, gRPC on {addresses}\n", highlight=False)
        with display(console) as show:
            streams = asyncio.run(stream_all(cluster.routers, PROMPTS, PARAMS, show))
        console.print(figures(streams))
        pids = pids_of(REPLICA, application_name(config.cluster.namespace, config.model.name))
        console.print("\nonce more, and on the way a replica is killed\n")
        with redirect_stdout(StringIO()), display(console) as show:  # Ray prints a paragraph about the death
            loss = asyncio.run(stream_with_a_loss(cluster.routers, pids, PROMPTS, PARAMS, show))
        console.print(loss.table(streams))
    console.print(f"stopped; {time.monotonic() - started_s:.1f} s in all", highlight=False)
    return 0 if loss.is_unseen(streams) else 1


if __name__ == "__main__":
    sys.exit(main())
