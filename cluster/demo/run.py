"""The demo: a local cluster, four prompts streamed at once over gRPC, and the same again while a replica is killed.

`make demo`, `holdfast demo` and `python -m holdfast.cluster.demo.run` are the same.
"""

import asyncio
import sys
import time
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from typing import Final

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
