"""Benchmark of a replica's memory: leader and ranks after each of several rounds of requests, no two of them alike.

    python -m benchmarks.memory [--tensor-parallel-size 2] [--rounds 6] [--requests 1000] [--num-blocks 1024]

The bundled model. Requests are drawn from a seed: lengths, filters, penalties, logprobs, salts, tenants, schemas, stop
strings, cancellations. Printed after each round, when nothing runs: the resident memory of the leader and of each rank;
of the leader also the used blocks of the KV cache, the C heap and the number of Python objects. A figure that levels
off is a cache; one that rises by as much in every round is a leak.
"""

import argparse
import ctypes
import gc
import random
import sys
from collections import deque
from collections.abc import Sequence

import psutil

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.request_handle import RequestHandle
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams

AT_ONCE = 64
MB = 2**20
TIMEOUT_S = 300


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def heap_mb() -> tuple[int, int]:
    """Of this process's C heap, over all arenas: what is in use, and what is free and kept."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return (info.uordblks + info.hblkhd) // MB, info.fordblks // MB


def shape(draw: random.Random) -> dict[str, object]:
    """A structure that no request has had before."""
    kind, number = draw.choice(("json", "regex", "choice")), draw.getrandbits(32)
    if kind == "json":
        return {"json": {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}}
    return {"regex": f"[a-z]{{1,9}}-{number}"} if kind == "regex" else {"choice": [f"word{number}", "other"]}


def odd_params(draw: random.Random) -> SamplingParams:
    max_tokens = draw.randint(1, 40)
    rare: dict[str, object] = {
        "repetition_penalty": draw.uniform(0.5, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "logprobs": draw.randint(0, 20),
        "prompt_logprobs": draw.randint(0, 20),
        "min_tokens": draw.randint(0, max_tokens),
        "logit_bias": {draw.randrange(1000): draw.uniform(-9, 9) for _ in range(20)},
        "allowed_token_ids": [draw.randrange(1000) for _ in range(draw.randint(1, 50))],
        "bad_words": [f"bad{draw.getrandbits(20)}"],
        "stop": [f"s{draw.getrandbits(12):x}", "e a"],
        "structured_outputs": shape(draw),
    }
    chosen = {name: rare[name] for name in draw.sample(list(rare), draw.choice((0, 0, 1, 2, 3)))}
    common: dict[str, object] = {
        "temperature": draw.choice((0.0, 0.3, 1.0, 2.0)),
        "top_k": draw.choice((0, 1, 40)),
        "top_p": draw.choice((1.0, 0.3, 0.95)),
        "seed": draw.getrandbits(60),
        "max_tokens": max_tokens,
        "n": draw.choice((1, 1, 1, 1, 2, 5)),
    }
    return SamplingParams(**(common | chosen))  # type: ignore[arg-type]


def submit(engine: InferenceEngine, draw: random.Random) -> RequestHandle:
    letters = (draw.choice((draw.randint(32, 126), draw.randint(32, 0x2FFF))) for _ in range(draw.choice((1, 40, 200))))
    handle = engine.submit_request(
        "".join(map(chr, letters)),
        odd_params(draw),
        Priority(draw.randrange(4)),
        tenant=f"t{draw.getrandbits(30)}",
        cache_salt=draw.choice(("", f"{draw.getrandbits(30)}")),
    )
    if draw.random() < 0.1:
        handle.cancel()
    return handle


def run_round(engine: InferenceEngine, draw: random.Random, num_requests: int) -> None:
    handles: deque[RequestHandle] = deque()
    for _ in range(num_requests):
        handles.append(submit(engine, draw))
        if len(handles) >= AT_ONCE:
            handles.popleft().result(TIMEOUT_S)
    for handle in handles:
        handle.result(TIMEOUT_S)


def figures(engine: InferenceEngine, ranks: list[psutil.Process]) -> list[int]:
    gc.collect()
    stats, info = engine.get_stats(), engine.info
    cached = stats.num_cached_blocks * info.block_size * info.kv_bytes_per_token
    resident = [process.memory_info().rss // MB for process in (psutil.Process(), *ranks)]
    return [*resident, cached // MB, *heap_mb(), sys.getallocatedblocks() // 1000]


def print_row(name: str, cells: Sequence[object]) -> None:
    print(f"{name:<10}", *(f"{cell:>10}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=1000, help="of one round")
    parser.add_argument("--num-blocks", type=int, default=1024, help="of the KV cache; 16 tokens each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parallel, cache = {"tensor_parallel_size": args.tensor_parallel_size}, {"num_blocks": args.num_blocks}
    draw = random.Random(args.seed)
    with InferenceEngine("demo", {"parallel": parallel, "cache": cache}) as engine:
        ranks = [child for child in psutil.Process().children() if "run_child" in " ".join(child.cmdline())]
        names = ["leader", *(f"rank {number + 1}" for number in range(len(ranks)))]
        print_row("MB", [*names, "KV cached", "heap used", "heap kept", "1000 Py bl."])
        print_row("start", figures(engine, ranks))
        for number in range(args.rounds):
            run_round(engine, draw, args.requests)
            print_row(f"round {number + 1}", figures(engine, ranks))


if __name__ == "__main__":
    main()
