"""Instructions of linears of quantized weights, compiled ahead, and what share of a memory's rate they allow.

    python -m scripts.gpu_code_loops

A GPU issues four instructions a cycle on each multiprocessor, so its rate of weights is no more than that over the
instructions of one. Needs Triton, which brings its own ptxas and cuobjdump, and no GPU.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from scripts.gpu_kernels import Use, compiled_for, use_of
from scripts.gpu_shapes import CODES, coded_matrix

_DEVICES: Final = {
    "a100": (80, 108, 1.41e9),
    "h100": (90, 132, 1.755e9),
    "h200": (90, 132, 1.755e9),
    "b200": (100, 148, 1.85e9),
}
"""Compute capability, multiprocessors, cycles a second while all of them work (data sheets; boost rates are above)."""

_ISSUED: Final = 4
"""Instructions a cycle and multiprocessor, each of 32 threads."""

_LINE: Final = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);")
_BRANCH: Final = re.compile(r"BRA\S*\s+.*?0x([0-9a-f]+)")


def loop_length(cubin: bytes) -> int:
    """Instructions of the longest loop of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(place, 16), line) for place, line in _LINE.findall(text)]
    loops = [
        sum(int(found[1], 16) <= other <= place for other, _ in lines)
        for place, line in lines
        if (found := _BRANCH.search(line)) and int(found[1], 16) < place
    ]
    return max(loops)


def uses(num_rows: int) -> dict[str, Use]:
    """By form of codes, the linear of so many rows."""
    import torch

    from holdfast.worker.executors.gpu.launches import Launches
    from holdfast.worker.executors.linears import Linear

    found: dict[str, Use] = {}
    for name, (form, group) in CODES.items():

        def record(kernel: Any, grid: Any, arguments: Any, *, num_warps: int, num_stages: int, of: str = name) -> None:
            found[of] = use_of(kernel, arguments, num_warps, num_stages)

        x = torch.empty((num_rows, 4096), dtype=torch.bfloat16, device="meta")
        out = torch.empty((1, num_rows, 4096), device="meta")
        Launches(record).linear(x, Linear(codes=(coded_matrix(form, group),)), out)
    return found


def main() -> int:
    from holdfast.worker.models.roofline import DEVICES

    print(f"{'codes, 1 row':32}" + "".join(f"{name:>18}" for name in _DEVICES))
    for name, use in uses(1).items():
        form, group = CODES[name]
        constants, cells = dict(use.constants), []
        matrix = coded_matrix(form, group)
        for device, (capability, multiprocessors, cycles) in _DEVICES.items():
            weights = constants["OUTPUTS"] * constants["INPUTS"] / (32 * use.num_warps)
            of_weight = loop_length(compiled_for(use, capability).asm["cubin"]) / weights
            issued = multiprocessors * _ISSUED * cycles * 32 / of_weight
            read = DEVICES[device].bytes_per_s / (matrix.nbytes / (4096 * 4096))
            cells.append(f"{of_weight:10.2f} {min(1.0, issued / read):7.0%}")
        print(f"{name:32}" + "".join(cells))
    return 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    sys.exit(main())
