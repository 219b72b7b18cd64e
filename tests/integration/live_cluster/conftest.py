"""One cluster for all tests in this folder, and what one process alone answers, to compare with.

The folder is a package because the life of the cluster is the package's: a machine has room for one Ray.
"""

import signal
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.serving import serving
from holdfast.cluster.serve.start_up import Serving
from holdfast.worker.config import ParallelConfig
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams
from tests.integration import models_at_run_time as run_time
from tests.integration.processes import ray_processes, two_free_ports
from tests.integration.streams import NUM_STREAMS, WORDS, Answer, Wish, long_wish, wish


@pytest.fixture(scope="package")
def cluster() -> Iterator[Serving]:
    """Two replicas of two ranks each behind two routers, on a Ray of their own. Ends without a process left behind."""
    config = HoldfastConfig(
        cluster=ClusterConfig(replicas=2, port=two_free_ports(), engine_port=0, http_port=0),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with progress(sys.stderr) as report, serving(config, report) as serving_cluster:
        yield serving_cluster
        processes = ray_processes()
    signal.signal(signal.SIGTERM, on_sigterm)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


@pytest.fixture(scope="package")
def expected() -> Callable[[list[Wish]], list[Answer]]:
    """What one process without Ray or gRPC answers, at the same tensor-parallel degree."""
    wishes = [wish(number) for number in range(NUM_STREAMS)] + [long_wish(number) for number in range(len(WORDS))]
    with LLM("demo", tensor_parallel_size=2, num_threads=1) as llm:
        outputs = llm.generate([wish.prompt for wish in wishes], [wish.params for wish in wishes])
    answers = {}
    for made, output in zip(wishes, outputs, strict=True):
        completion = output.outputs[0]
        answers[made] = Answer(completion.token_ids, completion.text, FinishReason(str(completion.finish_reason)))
    return lambda wanted: [answers[made] for made in wanted]


@pytest.fixture(scope="package")
def alone() -> Iterator[Callable[[SamplingParams], str]]:
    """What one process answers to `run_time.PROMPT` with one rank."""
    with LLM("demo", num_threads=1) as llm:
        yield lambda params: llm.generate(run_time.PROMPT, params)[0].outputs[0].text
