"""Compiler driver of the native executor: C++ sources to a shared library for each instruction class.

One library for all would let the linker pick, of equal template functions, one that the machine cannot run. A library
carries the digest of what it was made from; a stale one is not used. What may not live here: loading and calling the
library (`library.py`), and third-party imports, since a package's build runs this file by itself.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent / "native"

_COMMON: Final = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-Wno-maybe-uninitialized")
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

CLASSES: Final = {
    "amx": (*_AVX512, "-mavx512bf16", "-DHF_AMX"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""Flags of each instruction class, best first."""

SOFTWARE_TILES: Final = {
    "tiles512": (*_AVX512, "-DHF_SOFTWARE_TILES"),
    "tiles2": (*_AVX2, "-DHF_SOFTWARE_TILES"),
}
"""The logic of `amx` with its tiles in software: for tests, on machines without them."""

_COMPILERS: Final = (("g++",), ("clang++",), ("c++",))


class NoCompilerError(RuntimeError):
    """There is no C++ compiler on this machine, or it cannot compile the executor."""


def digest(extra_flags: Sequence[str] = ()) -> str:
    """Names the sources and flags: a library of the same name does the same."""
    seen = hashlib.sha256(repr((CLASSES, SOFTWARE_TILES, _COMMON, tuple(extra_flags))).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        seen.update(source.name.encode() + b"\0" + source.read_bytes())
    return seen.hexdigest()[:16]


def find_compiler() -> tuple[str, ...]:
    """The command of a C++17 compiler: the system's, or that of the `ziglang` package.

    Raises `NoCompilerError`.
    """
    for command in _COMPILERS:
        if shutil.which(command[0]):
            return command
    zig = Path(sysconfig.get_paths()["purelib"]) / "ziglang" / "zig"
    if zig.is_file():
        return (str(zig), "c++")
    raise NoCompilerError("no C++ compiler was found (try: apt-get install g++, or pip install ziglang)")


def compile_libraries(folder: Path, classes: Sequence[str] = tuple(CLASSES), extra_flags: Sequence[str] = ()) -> None:
    """Compiles `folder/CLASS.so` for each class, each of which appears whole or not at all.

    Raises `NoCompilerError` where there is no compiler or it fails; the message has its first complaint.
    """
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as objects, ThreadPoolExecutor(os.cpu_count()) as threads:
        flags = (*_COMMON, *extra_flags, f'-DHF_DIGEST="{digest(extra_flags)}"')
        jobs = [
            (*compiler, *flags, *own, "-c", str(SOURCES / f"{source}.cpp"), "-o", f"{objects}/{name}.o")
            for source, name, own in (
                *(("executor", name, (CLASSES | SOFTWARE_TILES)[name]) for name in classes),
                ("pool", "pool", ()),
                ("packing", "packing", ()),
            )
        ]
        list(threads.map(_run, jobs))
        common = (f"{objects}/pool.o", f"{objects}/packing.o", "-lpthread")
        for name in classes:
            linked = Path(objects) / f"{name}.so"
            _run(
                (
                    *compiler,
                    *extra_flags,
                    "-shared",
                    "-Wl,-Bsymbolic",
                    f"{objects}/{name}.o",
                    *common,
                    "-o",
                    str(linked),
                )
            )
            linked.rename(folder / linked.name)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NoCompilerError(f"{command[0]} cannot compile the native executor: {complaint}")


if __name__ == "__main__":
    compile_libraries(Path(sys.argv[1]), sys.argv[2:] or tuple(CLASSES))
