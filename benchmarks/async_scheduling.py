"""One plan in flight against two, on this machine: tokens a second of an engine over the native executor.

    python -m benchmarks.async_scheduling [--model demo] [--rows 1,8,32,64] [--threads 1,2] [--rounds 5] [--tokens 200]

Requests of one prompt each decode together on an engine with its own thread; with two plans in flight, steps run on
another one (`worker/engine/threaded_runner.py`). Rounds with one plan and with two alternate on one loaded model, and
the table has their medians and the range of their ratio. Half of the requests are greedy, half are drawn with a
temperature. Tokens must be equal. A listener does what a replica's link does with an update: it writes the message.
"""

import argparse
import platform
import statistics
import threading
import time
from collections import defaultdict
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.engine.threaded_runner import ThreadedRunner
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import AttemptKey, EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduling.scheduler import Scheduler
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.wire.link_responses import step_messages

NUM_PROMPT_TOKENS: Final = 40


class KeptLeader(LeaderRunner):
    """Goes on for the next engine."""

    def close(self) -> None:
        pass


class Listener:
    """Writes each update, and knows when all requests have ended."""

    def __init__(self, num_requests: int) -> None:
        self.tokens: dict[object, list[int]] = defaultdict(list)
        self.done = threading.Event()
        self._num_left = num_requests

    def on_update(self, update: StepUpdate) -> None:
        for _ in step_messages(update):
            pass
        for delta in update.deltas:
            self.tokens[delta.attempt].extend(delta.token_ids)
            self._num_left -= delta.finish_reason is not None
        if self._num_left == 0:
            self.done.set()

    def on_failure(self, error: HoldfastError) -> None:
        self.done.set()


def served(leader: KeptLeader, num_rows: int, num_tokens: int, *, two_plans: bool) -> tuple[float, object]:
    """Tokens a second, and the tokens."""
    info = leader._runner.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=4096),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
        prefix_caching=False,
    )
    engine = Engine(scheduler, ThreadedRunner(leader) if two_plans else leader, progress=leader._runner.progress)
    listener = Listener(num_rows)
    engine.attach(listener)
    for number in range(num_rows):
        engine.submit(request(number, num_tokens), listener, AttemptKey("link", number))
    began_s = time.perf_counter()
    engine.start()
    listener.done.wait()
    took_s = time.perf_counter() - began_s
    engine.stop()
    assert sum(map(len, listener.tokens.values())) == num_rows * num_tokens, engine.failure
    return num_rows * num_tokens / took_s, dict(listener.tokens)


def request(number: int, num_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(range(5 + number, 5 + number + NUM_PROMPT_TOKENS)),
        sampling_params=SamplingParams(
            seed=number, max_tokens=num_tokens, temperature=0.0 if number % 2 == 0 else 0.8, ignore_eos=True
        ),
    )


def load(model: str, num_threads: int) -> KeptLeader:
    torch.set_num_threads(num_threads)
    config = located(
        WorkerConfig(
            model=ModelConfig(model=model, device="cpu"),
            parallel=ParallelConfig(num_threads=num_threads),
            cache=CacheConfig(num_blocks=2048),
        )
    )
    group = SingleRank()
    return KeptLeader(ModelRunner.load(config, group, device=torch.device("cpu")), group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    table = Table("threads", "rows", "one plan, tokens/s", "two plans, tokens/s", "ratio", title=platform.processor())
    for num_threads in map(int, options.threads.split(",")):
        leader = load(options.model, num_threads)
        for num_rows in map(int, options.rows.split(",")):
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for number in range(options.rounds + 1):
                (one, told), (two, told_ahead) = (
                    served(leader, num_rows, options.tokens, two_plans=two_plans) for two_plans in (False, True)
                )
                assert told == told_ahead, "tokens are the same"
                if number > 0:
                    speeds[False].append(one)
                    speeds[True].append(two)
            ratios = [two / one for one, two in zip(speeds[False], speeds[True], strict=True)]
            medians = [f"{statistics.median(speeds[kind]):,.0f}" for kind in (False, True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            table.add_row(str(num_threads), str(num_rows), *medians, spread)
    Console().print(table)


if __name__ == "__main__":
    main()
