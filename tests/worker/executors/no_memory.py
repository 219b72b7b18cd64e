"""The native executor in a process whose C++ gets no memory from some allocation on: packing, steps, draws. A program.

Arguments: the library with the failing `operator new`, which is preloaded, and the folders of models.
"""

import ctypes
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu import part_packing
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.step_plan import StepPlan
from tests.draw_params import draw_params
from tests.parity.harness import Sequences, load, worker_config
from tests.worker.executors.cpu.native import Product, same_bits

FAILING = ctypes.CDLL(sys.argv[1])
FAILING.fail_after.argtypes = [ctypes.c_long]
FAILING.stop_failing.restype = ctypes.c_long


STEP = ("native_decoder_create", "native_decoder_begin", "native_decoder_run", "native_sample")
PACKING = ("native_pack", "native_expand")


class Armed:
    """A library some of whose functions get so many allocations each call, and then none."""

    def __init__(self, library: Any, armed: tuple[str, ...] = STEP) -> None:
        self._library = library
        self._armed = armed
        self.num_calls = sys.maxsize
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._library, name)
        if name not in self._armed:
            return call

        def armed(*arguments: Any) -> Any:
            FAILING.fail_after(self.num_calls)
            try:
                return call(*arguments)
            finally:
                self.num_failed += FAILING.stop_failing()

        return armed


def tried(library: Armed, work: Any, renew: Any) -> tuple[Any, int]:
    """What `work` gives once nothing fails, and how often it has failed before, each time by an error that says so."""
    num_errors = 0
    for num_calls in range(10_000):
        renew()
        library.num_calls, library.num_failed = num_calls, 0
        try:
            result = work()
        except ReplicaError as error:
            if not re.search("(no|out of) memory|threads could not be started", str(error)):
                raise
            num_errors += 1
        else:
            assert not library.num_failed, f"{num_calls}: a failure that nobody was told of"
            return result, num_errors
    raise AssertionError("it never ended")


def steps(folder: Path) -> int:
    leader = load(worker_config(folder, executor="native"))
    executor = leader._runner.backend.executor
    library = executor._library = executor.pool.library = Armed(executor._library)
    prompts = [[5, 9, 77, 31, 8, 64, 3] * 7, [6, 6, 6], [9]]

    def run() -> Any:
        sequences = Sequences(leader, prompts)
        shares = tuple(sequences.scheduled(n, 0, len(prompt), 1) for n, prompt in enumerate(prompts))
        return leader.run(StepPlan(step_id=1, others=shares)).token_ids

    right = run()
    result, num_errors = tried(library, run, executor._drop_decoder)
    assert result == right
    return num_errors


def draws() -> int:
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(3))
    params = draw_params(seed=5, first_output_index=0, temperature=1.0, top_k=700, top_p=0.9, num_logprobs=4)
    sampler = OwnPoolSampler.with_threads(2)
    real, create = sampler._library, sampler._library.native_sampler_create
    library = sampler._library = Armed(real)

    def renew() -> None:
        real.native_sampler_destroy(sampler._sampler)
        sampler._sampler = create(sampler.own_pool)

    def draw() -> Any:
        return sampler.sample(HeadOutput(logits, None), [params] * 9).token_ids

    right = draw()
    result, num_errors = tried(library, draw, renew)
    assert result == right
    return num_errors


def pools() -> int:
    library = Armed(load_library(), ("native_pool_create", "native_sampler_create"))

    def start() -> None:
        with patch("benchmarks.own_pool_sampler.load_library", return_value=library):
            OwnPoolSampler.with_threads(3).close()

    return tried(library, start, lambda: None)[1]


def products() -> int:
    """Of a weight that is kept compact, of which a part has to be kept as tiles after all."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(192, 96, generator=random).bfloat16()
    weight[128:] = torch.randint(-(2**15), 2**15, (64, 96), generator=random).short().view(torch.bfloat16)
    weight = weight.nan_to_num(1.0, 1.0, 1.0)
    inputs = torch.randn(5, 96, generator=random).bfloat16()
    library = load_library()
    with ThreadPoolExecutor(1) as other:  # a thread keeps what its first product has allocated
        right = other.submit(lambda: Product(library, weight)(inputs)).result()
    num_errors = 0
    for compacts in (True, False):
        armed = Armed(library, (*PACKING, "native_multiply"))
        armed.num_calls = 0  # packing needs no memory of C++
        with patch.object(part_packing, "PIECE_BYTES", 64 * 96 * 2):
            packed = Product(armed, weight, compacts=compacts)
        result, failed = tried(armed, lambda packed=packed: packed(inputs), lambda: None)
        assert same_bits(result, right)
        num_errors += failed
    return num_errors


def opened() -> int:
    """A library that is opened where C++ gets no memory: it is there, or an error says why not."""
    copy = Path(sys.argv[1]).parent / "again.so"
    shutil.copy(load_library()._name, copy)
    FAILING.fail_after(0)
    try:
        library = ctypes.CDLL(str(copy))
        assert library.native_pairs_agree()
    finally:
        FAILING.stop_failing()
    return 1


if __name__ == "__main__":
    print(*[steps(Path(folder)) for folder in sys.argv[2:]], draws(), pools(), products(), opened())
