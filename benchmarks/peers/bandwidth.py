"""Memory bandwidth of this machine: what bounds one request's decoding on a model that no cache holds.

python -m benchmarks.peers.bandwidth        prints GB/s, the best of two ways to read 1 GiB
"""

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

_BYTES: Final = 1 << 30
_ROUNDS: Final = 7


def median_s(work: Callable[[], object]) -> float:
    """After one round that is not counted."""
    times = []
    for _ in range(_ROUNDS + 1):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


def main() -> None:
    numbers = torch.ones(_BYTES // 4)
    fastest_s = median_s(numbers.sum)
    del numbers
    matrix, vector = torch.ones(_BYTES // 2048, 1024, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)
    fastest_s = min(fastest_s, median_s(lambda: torch.mv(matrix, vector)))
    print(f"{_BYTES / fastest_s / 1e9:.2f}")


if __name__ == "__main__":
    main()
