"""Compiler driver of the native executor: C++ sources to a shared library for each instruction class.

With one library for all, the linker could pick, of equal template functions, one that the machine cannot run. A library
carries the digest of its sources; a stale one is not used.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

SOURCES: Final = Path(__file__).parent / "native"

_COMMON: Final = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-Wno-maybe-uninitialized")
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_VNNI: Final = ("-mavx512vnni", "-DNATIVE_VNNI")

CLASSES: Final = {
    "amx": (*_AVX512, *_VNNI, "-mavx512bf16", "-DNATIVE_AMX"),
    "avx512bf16": (*_AVX512, *_VNNI, "-mavx512bf16", "-DNATIVE_PAIRS"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""Flags of each instruction class, best first."""

IN_SOFTWARE: Final = {
    "tiles512": (*_AVX512, "-DNATIVE_SOFTWARE_TILES", "-DNATIVE_BF16_ALONE"),
    "tiles2": (*_AVX2, "-DNATIVE_SOFTWARE_TILES", "-DNATIVE_BF16_ALONE"),
    "pairs2": (*_AVX2, "-DNATIVE_PAIRS", "-DNATIVE_VNNI", "-DNATIVE_BF16_ALONE"),
}
"""The logic of `amx` and `avx512bf16` with their instructions in software: for tests anywhere. For bf16 alone."""

_COMPILERS: Final = (("g++",), ("clang++",), ("c++",))


_ANY_CLASS: Final = {**CLASSES, **IN_SOFTWARE, "any": _AVX2, "pairs": (*_AVX2, "-DNATIVE_PAIRS")}


class NoCompilerError(RuntimeError):
    """There is no C++ compiler on this machine, or it cannot compile the executor."""


def digest(extra_flags: Sequence[str] = ()) -> str:
    """Names the sources and flags: a library of the same name does the same."""
    seen = hashlib.sha256(repr((CLASSES, IN_SOFTWARE, _COMMON, tuple(extra_flags))).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        seen.update(source.name.encode() + b"\0" + source.read_bytes())
    return seen.hexdigest()[:16]


def is_current(library: Path, extra_flags: Sequence[str] = ()) -> bool:
    """Whether a library is there and was made from the present sources: the digest is among its bytes."""
    return library.is_file() and digest(extra_flags).encode() in library.read_bytes()


def find_compiler() -> tuple[str, ...]:
    """The command of a C++17 compiler: the system's, or that of the `ziglang` package.

    Raises `NoCompilerError`.
    """
    for command in _COMPILERS:
        if shutil.which(command[0]):
            return command
    zig = Path(sysconfig.get_paths()["purelib"]) / "ziglang" / "zig"
    if zig.is_file():
        return (str(zig), "c++", "-target", "x86_64-linux-gnu")  # without a target it compiles for this very CPU
    raise NoCompilerError("no C++ compiler was found (try: apt-get install g++, or pip install ziglang)")


def compile_libraries(folder: Path, classes: Sequence[str] = tuple(CLASSES), extra_flags: Sequence[str] = ()) -> None:
    """Compiles `folder/CLASS.so` for each class, each of which appears whole or not at all.

    Raises `NoCompilerError` where there is no compiler or it fails; the message has its first complaint.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NoCompilerError(
            f"the native executor runs on Linux on x86-64, not on {sys.platform} {platform.machine()}"
        )
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as objects, ThreadPoolExecutor(os.cpu_count()) as threads:
        common = (*compiler, *_COMMON, *extra_flags, f'-DNATIVE_DIGEST="{digest(extra_flags)}"')
        parts = {name: _parts(name) for name in classes}
        commands = {
            part: (
                *common,
                *_ANY_CLASS[part.flags],
                "-c",
                str(SOURCES / f"{part.source}.cpp"),
                "-o",
                f"{objects}/{part}",
            )
            for part in sorted({part for own in parts.values() for part in own}, reverse=True)  # `plain` takes longest
        }
        list(threads.map(_run, commands.values()))
        for name, own in parts.items():
            linked = Path(objects) / f"{name}.so"
            files = [f"{objects}/{part}" for part in own]
            _run((*compiler, *extra_flags, "-shared", "-Wl,-Bsymbolic", *files, "-lpthread", "-o", str(linked)))
            linked.rename(folder / linked.name)


class _Part(NamedTuple):
    """An object file, which several libraries may share."""

    source: str
    flags: str

    def __str__(self) -> str:
        return f"{self.source}-{self.flags}.o"


def _parts(name: str) -> list[_Part]:
    """Object files that a library is linked from. Only bf16 has tiles or pairs: classes share the plain dtypes."""
    lanes = "avx2" if name in ("avx2", "tiles2", "pairs2") else "avx512"
    order = "pairs" if "-DNATIVE_PAIRS" in _ANY_CLASS[name] else "any"
    parts = [_Part("executor", name), _Part("sampler", lanes), _Part("packing", order), _Part("packing_codes", order)]
    parts += [_Part(source, lanes) for source in ("search_codes", "block_rows")]
    same = ("packing_units", "packing_adapters", "compact", "pool", "quantize")
    parts += [_Part(source, "any") for source in same]
    return [*parts, _Part("plain", lanes)] if name in CLASSES else parts


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NoCompilerError(f"{command[0]} cannot compile the native executor: {complaint}")


def main() -> None:
    """Parses the command line and compiles the libraries."""
    parser = argparse.ArgumentParser(description="Compiles the native executor's libraries.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "classes", nargs="*", metavar="class", help=f"of {', '.join(_ANY_CLASS)}; default: the shipped ones"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.classes) - _ANY_CLASS.keys():
        parser.error(f"no such class: {', '.join(sorted(unknown))}")
    compile_libraries(arguments.folder, arguments.classes or tuple(CLASSES))


if __name__ == "__main__":
    main()
