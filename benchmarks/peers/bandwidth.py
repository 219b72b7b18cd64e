"""Memory bandwidth of this machine: what bounds one request's decoding on a model that no cache holds.

python -m benchmarks.peers.bandwidth        prints GB/s, the best of two ways to read 1 GiB
"""

import time
from collections.abc import Callable
from typing import Final

import torch

_BYTES: Final = 1 << 30
_ROUNDS: Final = 10


def fastest_s(work: Callable[[], object]) -> float:
    """The best of some rounds, because whatever else runs on a machine only ever makes it slower."""
    times = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


def main() -> None:
    numbers = torch.ones(_BYTES // 4)
    seconds = fastest_s(numbers.sum)
    del numbers
    matrix, vector = torch.ones(_BYTES // 2048, 1024, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)
    seconds = min(seconds, fastest_s(lambda: torch.mv(matrix, vector)))
    print(f"{_BYTES / seconds / 1e9:.2f}")


if __name__ == "__main__":
    main()
