"""Loading of the native executor's library: finds it, or compiles it once, and declares its functions."""

import ctypes
import fcntl
import logging
from ctypes import CDLL, POINTER, c_char_p, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.executors.cpu.build import (
    CLASSES,
    IN_SOFTWARE,
    NoCompilerError,
    compile_libraries,
    digest,
    is_current,
)
from holdfast.worker.executors.cpu.linear_structures import NativeLinear, NativeUnits
from holdfast.worker.executors.cpu.model_structures import NativeModel
from holdfast.worker.executors.cpu.step_structures import (
    NativeAttention,
    NativeAttentionRows,
    NativeDrawn,
    NativeEdits,
    NativeStep,
)
from holdfast.worker.executors.cpu.structures import STRUCTURES
from holdfast.worker.user_folder import user_folder

logger = logging.getLogger(__name__)

INSTALLED: Final = Path(__file__).parent / "libraries"
"""Folder where a package's build puts the libraries."""

_FLAGS: Final = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
_FLAGS_OF: Final = {
    "amx": _FLAGS["avx512"] | {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"},
    "avx512bf16": _FLAGS["avx512"] | {"avx512_bf16", "avx512_vnni"},
    "avx512": _FLAGS["avx512"],
    "tiles512": _FLAGS["avx512"],
    "avx2": _FLAGS["avx2"],
    "tiles2": _FLAGS["avx2"],
    "pairs2": _FLAGS["avx2"],
}


COMPACT_CLASSES: Final = frozenset({"avx512bf16", "avx512", "avx2"})
"""Instruction classes that keep bfloat16 compact: where reading it was measured to cost less than it saves."""

CODED_CLASSES: Final = COMPACT_CLASSES
"""The same of E4M3, which they keep as codes."""


class Unavailable(ConfigurationError):
    """The native library cannot run here; the message names the missing feature."""


def runnable_classes() -> list[str]:
    """The instruction classes that this machine runs, best first."""
    return [name for name in CLASSES if not missing_instructions(name)]


def kept_forms(name: str, compacts: bool | None) -> dict[str, bool]:
    """Settings of `PackedModel` by which an instruction class keeps weights of a bfloat16 model. `compacts` says it of
    all forms; None: each where it is faster.
    """
    by_class = {"compacts": name in COMPACT_CLASSES, "keeps_codes": name in CODED_CLASSES}
    return by_class if compacts is None else dict.fromkeys(by_class, compacts)


def keeps_codes_here() -> bool:
    """Whether this machine's best class keeps E4M3 as codes."""
    return next(iter(runnable_classes()), None) in CODED_CLASSES


def missing_instructions(name: str) -> set[str]:
    """Instructions of a class that this machine lacks, those of software tiles included."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.is_file() else []
    return _FLAGS_OF[name] - set(next((line for line in lines if line.startswith("flags")), "").split())


@cache
def load_library(name: str | None = None) -> CDLL:
    """The library of an instruction class; None: the best that this machine runs.

    Compiles it first if there is none for these sources. Raises `Unavailable`.
    """
    runnable = runnable_classes()
    if name is None and not runnable:
        raise Unavailable("this CPU has no AVX2 with FMA, which a worker on a CPU needs")
    if name is not None and (missing := missing_instructions(name)):
        raise Unavailable(f"this CPU does not run {name}: it has no {', '.join(sorted(missing))}")
    for choice in [name] if name else runnable:
        library = _declared(_opened(path_of(choice)))
        if (reason := _reason_against(choice, library)) is None:
            return library
        logger.info("not by %s: %s", choice, reason)
    raise Unavailable(reason or "")


def _opened(path: Path) -> CDLL:
    try:
        return CDLL(str(path))
    except OSError as error:  # no memory for it, or a file system that nothing is executed from
        raise Unavailable(f"the native library cannot be loaded: {error}") from error


def _reason_against(name: str, library: CDLL) -> str | None:
    """Why a class that this machine should run is not used; None: it is."""
    if name == "amx" and library.native_allow_tiles():
        return "the system does not let this process use AMX's tiles"
    if not library.native_pairs_agree():
        return "this CPU's VDPBF16PS rounds in another way than two fused multiply-adds"
    return None


def class_of(library: CDLL) -> str:
    """The instruction class of a loaded library."""
    return Path(library._name).stem


def path_of(name: str) -> Path:
    """Path of a class's library: beside the package, else in the user's cache, compiled if it has to be.

    Raises `Unavailable`.
    """
    if is_current(installed := INSTALLED / f"{name}.so"):
        return installed
    folder = cache_folder()
    if is_current(path := folder / f"{name}.so"):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # ranks of one machine start together: one compiles, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(path):
            logger.info("compiling the native executor (%s), once on this machine", name)
            try:
                compile_libraries(folder, list(IN_SOFTWARE) if name in IN_SOFTWARE else [name])
            except NoCompilerError as error:
                raise Unavailable(f"no native library for this CPU: {error}") from error
    return path


def cache_folder() -> Path:
    """The user's cache of libraries that were made from these very sources."""
    return user_folder() / "native" / digest()


def _declared(library: CDLL) -> CDLL:
    """Checks that structures are as long here as there, and says what functions take and return."""
    sizes = (c_int * len(STRUCTURES))()
    library.native_sizes(sizes)
    for kind, size in zip(STRUCTURES, sizes, strict=True):
        assert ctypes.sizeof(kind) == size, f"{kind.__name__} has {ctypes.sizeof(kind)} bytes, and {size} in C++"
    library.native_digest.restype = c_char_p
    _declare(library, "native_pool_create", c_void_p, c_int, c_int, c_void_p)
    _declare(library, "native_pool_destroy", None, c_void_p)
    packed = (c_void_p, c_void_p, c_long, c_int, c_int, c_int, c_int, c_long, c_void_p)
    _declare(library, "native_pack", c_int, *packed)
    _declare(
        library,
        "native_pack_units",
        *(c_int, *(c_void_p,) * 6, c_long, c_int, POINTER(NativeUnits), c_void_p),
    )
    _declare(library, "native_compact_bytes", c_long, c_int)
    _declare(library, "native_coded_bytes", c_long, c_int, c_int)
    coded = (c_void_p, c_void_p, c_void_p, c_long, c_int, c_int, c_void_p)
    _declare(library, "native_pack_codes", c_int, *coded)
    _declare(library, "native_expand", c_int, c_void_p, c_void_p, c_long, c_int, c_void_p)
    searched = (c_void_p, c_int, c_long, c_long, c_long, c_int, c_void_p, c_void_p)
    _declare(library, "native_search_codes", c_int, *searched)
    rounded = (c_void_p, c_int, *(c_long,) * 5, c_int, c_void_p, c_void_p)
    _declare(library, "native_eight_bit_codes", c_int, *rounded)
    numbers = (c_void_p, c_long, c_long, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
    _declare(library, "native_numbers", None, *numbers)
    blocks = (c_int, c_int, c_void_p, c_long, c_void_p)
    _declare(library, "native_copy_blocks", None, *blocks, c_void_p)
    _declare(library, "native_copy_sealed", None, *blocks, *(c_void_p,) * 3)
    _declare(library, "native_copy_checked", c_int, c_long, *(c_void_p,) * 5)
    _declare(library, "native_places", None, c_int, c_void_p)
    _declare(library, "native_decoder_create", c_void_p, POINTER(NativeModel), c_int, c_void_p)
    _declare(library, "native_decoder_destroy", c_int, c_void_p)
    _declare(library, "native_decoder_begin", c_int, c_void_p, POINTER(NativeStep))
    _declare(library, "native_decoder_run", c_int, c_void_p, c_int, c_int, c_int)
    _declare(library, "native_decoder_launch", c_int, c_void_p, POINTER(NativeStep))
    _declare(library, "native_decoder_await", c_int, c_void_p)
    _declare(library, "native_decoder_partial", c_void_p, c_void_p)
    _declare(library, "native_decoder_residual", c_void_p, c_void_p)
    _declare(library, "native_decoder_stride", c_long, c_void_p)
    _declare(library, "native_exchange_bytes", c_long, c_int, c_long, c_int, c_int)
    _declare(library, "native_sampler_create", c_void_p, c_void_p)
    _declare(library, "native_sampler_destroy", c_int, c_void_p)
    _declare(
        library,
        "native_sample",
        *(c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int),
        *(POINTER(NativeEdits), POINTER(NativeDrawn), c_void_p, c_void_p, c_int),
    )
    _declare(
        library, "native_multiply", c_int, c_void_p, POINTER(NativeLinear), c_int, c_void_p, c_long, c_int, c_void_p
    )
    _declare(library, "native_load_adapter", c_int, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p)
    _declare(library, "native_attention_create", c_void_p, POINTER(NativeAttention), c_int, c_int, c_int, c_void_p)
    _declare(library, "native_attention_destroy", c_int, c_void_p)
    _declare(library, "native_attention_begin", c_int, c_void_p, POINTER(NativeStep))
    _declare(library, "native_attention_run", c_int, c_void_p, c_int, POINTER(NativeAttentionRows))
    _declare(library, "native_function", None, c_int, c_void_p, c_void_p, c_long)
    return library


def _declare(library: CDLL, name: str, result: type | None, *arguments: type) -> None:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments


OUT_OF_MEMORY: Final = -4
"""`kNoMemory` (`native/pool.h`)."""
_FORKED: Final = -1  # return code of decoder.h: the process was forked


def check_outcome(outcome: int, work: str) -> None:
    """Raises `ReplicaError` unless a call of the library has done its work, such as `a product`: outcomes below 0."""
    if outcome == OUT_OF_MEMORY:
        raise ReplicaError(f"there is no memory for {work}")
    if outcome == _FORKED:
        raise ReplicaError("this process was forked after the model was loaded, and lacks its threads")
    if outcome < 0:
        raise ReplicaError(f"the native library failed at {work} (outcome {outcome})")
