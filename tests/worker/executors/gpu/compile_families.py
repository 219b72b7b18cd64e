"""Compiles every kernel that the tiny models of all families launch, in each dtype and in fp8: for Hopper, and no GPU.

    TRITON_INTERPRET=0 python -m tests.worker.executors.gpu.compile_families [MODEL...]

The interpreter takes what the compiler does not: branches of two types, for one. Prints what does not compile.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.worker.executors.gpu.executor import GpuExecutor
from holdfast.worker.executors.gpu.weights import unfit
from holdfast.worker.executors.tensor_parallel import SingleRank
from scripts.gpu_kernels import Use, measured, use_of
from scripts.gpu_shapes import decode_batch, prompt_batch
from tests.worker.executors.cpu.runs import layout_of
from tests.worker.executors.models import MODELS


def uses_of_families(models: list[str]) -> dict[object, Use]:
    found: dict[object, Use] = {}

    def record(kernel: Any, grid: Any, arguments: Mapping[str, Any], *, num_warps: int, num_stages: int) -> None:
        use = use_of(kernel, arguments, num_warps, num_stages)
        found.setdefault((use.title, use.arguments), use)

    for model in models:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            layout = layout_of(model, dtype)
            if unfit(layout, 1, 64):
                continue
            executor = GpuExecutor(layout, SingleRank(), max_positions=4096, device=torch.device("meta"), launch=record)
            for in_fp8 in (False, True):
                if in_fp8:
                    executor.keep_kv_in_code()
                executor.allocate_cache(16, 64)
                for batch in (decode_batch(2, 2000), prompt_batch(100)):
                    executor.launch(batch, with_logits=False)
    return found


def main() -> int:
    failed = 0
    uses = uses_of_families(sys.argv[1:] or list(MODELS))
    for use in uses.values():
        try:
            measured(use, 90)
        except Exception as error:
            failed += 1
            print(f"{use.title}: {type(error).__name__}: {str(error)[:800]}")
    print(f"{len(uses) - failed} kernels of {len(uses)} compiled")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
