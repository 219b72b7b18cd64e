"""Compares how a tile's scores lie in registers where keys are in fp8 and where they are not; needs no GPU.

    TRITON_INTERPRET=0 python -m tests.worker.executors.gpu.compile_scores

Sums and maxima over keys go by that layout, so that another one would have other bits. Prints what differs.
"""

import re
import sys

from scripts.gpu_kernels import DEVICES, Use, compiled_for, uses_of
from scripts.gpu_shapes import SHAPES

_LAYOUT = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
_REDUCED = re.compile(r'"tt\.reduce"\((?:.*\n)*?\s*\}\) : \((tensor<[^>]*>)')


def layouts_of(use: Use, device: int) -> list[str]:
    """Of what is summed or compared, in order."""
    text = compiled_for(use, device).asm["ttgir"]
    names = dict(_LAYOUT.findall(text))
    return [re.sub(r"#\w+", lambda name: names[name[0]], kind) for kind in _REDUCED.findall(text)]


def main() -> int:
    uses = [use for use in uses_of([SHAPES["Llama-3.1-8B"]], (1, 64), 2048) if use.name == "attend"]
    plain = {use.title: use for use in uses if not dict(use.constants)["IN_FP8"]}
    others, differ = [use for use in uses if use.title not in plain], 0
    for use in others:
        for device in DEVICES:
            expected = layouts_of(plain[use.title.replace(", IN_FP8=True", "")], device)
            if not expected or (found := layouts_of(use, device)) != expected:
                differ += 1
                print(f"{use.title} on sm_{device}: {found}, not {expected}")
    print(f"{len(others)} kernels compared, {differ} differ")
    return bool(differ) or not others


if __name__ == "__main__":
    sys.exit(main())
