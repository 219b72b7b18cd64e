"""The native executor compiled with sanitizers of memory or of threads, and processes that load it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks import own_pool_sampler
from holdfast.worker.executors.cpu import build, library, products
from tests.worker.executors.cpu import native, runs

FLAGS: Final = {
    "memory": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "threads": ("-fsanitize=thread",),
}
RUNTIMES: Final = {"memory": ("libasan.so", "libubsan.so"), "threads": ("libtsan.so",)}


def is_possible() -> bool:
    """Whether there is a compiler."""
    return shutil.which("g++") is not None


def compiled(folder: Path, name: str, what: str = "memory") -> Path:
    """The library of an instruction class in a folder, compiled unless one of the present sources is there."""
    path, flags = folder / f"{name}.so", ("-g", "-O1", "-fno-omit-frame-pointer", *FLAGS[what])
    if not build.is_current(path, flags):
        build.compile_libraries(folder, [name], flags)
    return path


def environment(what: str = "memory") -> Mapping[str, str]:
    """Of a process that loads it."""
    runtimes = [
        subprocess.check_output(["g++", f"-print-file-name={runtime}"], text=True).strip() for runtime in RUNTIMES[what]
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",  # leaks would be the interpreter's
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=99",  # of others, which do not say how they lock
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def use(path: Path) -> None:
    """Whatever loads a library in this process loads this one from here on."""
    chosen, load = path.stem, library.load_library
    library.path_of = lambda name: path.with_name(f"{chosen}.so")
    for module in (native, own_pool_sampler, products):
        module.load_library = lambda name=None: load(chosen)  # type: ignore[attr-defined]
    native.ALL = ("avx2", chosen)
    native.other_classes = lambda *_: [chosen]
    runs.CpuExecutor.__init__.__globals__["load_library"] = lambda name=None: load(chosen)
