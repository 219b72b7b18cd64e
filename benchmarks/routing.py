"""Time of one routing decision, by policy and number of replicas, with 100,000 cached prefixes.

    python -m benchmarks.routing [--replicas 1,10,100,1000] [--decisions 3000] [--json FILE]

The registry is the router's own, on one thread without wires. Each decision is for another prompt; half of them begin
with a prefix that some replicas have cached. A decision includes the hashes of the prompt's blocks and the note of what
was sent; between two decisions, untimed, a replica reports its load. The sequence is run some times over, and of each
decision the least time counts: what interrupts one pass is not there in the next. The clock is that of the wall,
because a thread's own takes a system call, as long as a decision on some virtual machines.
"""

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, cast, get_args

from rich.console import Console
from rich.progress import track
from rich.table import Table

from holdfast.router.config import PolicyName, RouterConfig
from holdfast.router.dispatch.prefix_index import PromptPrefix
from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import TextState
from holdfast.worker.model_info import ModelInfo, ReplicaFacts
from holdfast.worker.request import EngineLoad, EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import EngineStats, StepUpdate

NUM_PREFIXES: Final = 100_000
PREFIX_TOKENS: Final = 128
NUM_PASSES: Final = 3
PROMPT_TOKENS: Final = 256
BLOCK_SIZE: Final = 16
MODEL: Final = "benchmark"
PARAMS: Final = SamplingParams(seed=1)
INFO: Final = ModelInfo(
    model=MODEL,
    path="/nowhere",
    model_type="none",
    max_model_len=4096,
    vocab_size=2**20,
    eos_token_ids=frozenset(),
    dtype="float32",
    tensor_parallel_size=1,
    block_size=BLOCK_SIZE,
    num_blocks=2**16,
    kv_bytes_per_token=8,
    row_invariant=True,
    transfers_blocks=True,
)
IDLE: Final = EngineLoad(num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=1, num_total_blocks=1)


def prompt(number: int, length: int, tail: int = 0) -> EngineRequest:
    """A prompt whose first `PREFIX_TOKENS` are those of a number, and whose others are its own."""
    own = (number, tail, *range(1000, 1000 + length - PREFIX_TOKENS))
    token_ids = (*(number % 2**20, number // 7, *range(PREFIX_TOKENS - 2)), *own)[:length]
    return EngineRequest(
        request_id="", prompt_token_ids=token_ids, sampling_params=PARAMS, session_id=f"session-{number}"
    )


def filled(policy: PolicyName, num_replicas: int, rng: random.Random, *, has_roles: bool = False) -> ReplicaRegistry:
    """A registry whose replicas have some load, and all prefixes between them: a tenth of these on several. With roles,
    a tenth of the replicas computes long prompts, and all others decode.
    """
    num_prefill = max(1, num_replicas // 10) if has_roles else 0
    roles = {"prefill_replicas": num_prefill, "decode_replicas": (num_replicas - num_prefill) * has_roles}
    registry = ReplicaRegistry(RouterConfig(routing_policy=policy, **roles), rng.randrange)
    for number in range(num_replicas):
        facts = replace(ReplicaFacts.of(f"replica-{number}", INFO), address=f"host-{number // 8}:1")
        registry.add(facts, replace(IDLE, num_running=rng.randrange(8)), 0.0)
    if has_roles:
        speeds = {"": 1e9, **{f"host-{number}": 1e9 for number in range(0, num_prefill, 8)}}
        told = EngineStats(prefill_tokens_per_s=2000.0, received_bytes_per_s=speeds)
        for replica in registry:
            replica.note_memory(StepUpdate(load=replica.load, stats=told))
    if policy == "prefix_aware":
        replicas = list(registry)
        for number in range(NUM_PREFIXES):
            prefix = PromptPrefix(prompt(number, PREFIX_TOKENS + 1))
            blocks = list(prefix.blocks(BLOCK_SIZE))
            for _ in range(4 if number % 10 == 0 else 1):
                rng.choice(replicas).cached.apply(blocks, ())
    return registry


def decisions_us(policy: PolicyName, num_replicas: int, num_decisions: int, *, has_roles: bool = False) -> list[float]:
    """Microseconds of each decision, the least of `NUM_PASSES`."""
    registry = filled(policy, num_replicas, random.Random(1), has_roles=has_roles)
    passes = [_pass_us(registry, num_decisions) for _ in range(NUM_PASSES)]
    return [min(times) for times in zip(*passes, strict=True)]


def _pass_us(registry: ReplicaRegistry, num_decisions: int) -> list[float]:
    """The same prompts, and the same reports, in every pass."""
    rng = random.Random(2)
    replicas: list[ReplicaState] = list(registry)
    times = []
    gc.collect()
    gc.disable()
    for number in range(num_decisions):
        request = prompt(rng.randrange(2 * NUM_PREFIXES), PROMPT_TOKENS, tail=number)
        state = RequestState(request=request, model=MODEL, text=cast(TextState, None))
        started = time.perf_counter_ns()
        chosen = registry.choose(state)
        assert chosen is not None
        chosen.note_sent(number, PROMPT_TOKENS)
        times.append((time.perf_counter_ns() - started) / 1000)
        chosen.note_end(number)
        rng.choice(replicas).note_report(replace(IDLE, num_running=rng.randrange(8)))
    gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,10,100,1000", help="numbers of replicas, with commas")
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.replicas.split(",")]
    table = Table("policy", *(f"{size} replicas" for size in sizes), title="us: median / 99th percentile")
    found = {}
    rows = [(policy, False) for policy in get_args(PolicyName)] + [("prefix_aware", True), ("power_of_two", True)]
    for policy, has_roles in track(rows, transient=True):
        cells = []
        name = f"{policy}, roles" if has_roles else policy
        for size in sizes:
            times = decisions_us(policy, size, arguments.decisions, has_roles=has_roles)
            median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
            found[f"{name} {size}"] = {"median_us": median, "p99_us": p99}
            cells.append(f"{median:.1f} / {p99:.1f}")
        table.add_row(name, *cells)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
