"""A wall clock that jumps, for processes that start under it: compiles `jumping_clock.c`, and moves its offset.

The machine's own clock stays as it is.
"""

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

FILE: Final = "HOLDFAST_TEST_CLOCK"
SOURCE: Final = Path(__file__).with_suffix(".c")
COMPILER: Final = shutil.which("gcc")
HOUR_S: Final = 3600.0
YEAR_S: Final = 365.25 * 24 * HOUR_S


class JumpingClock:
    """The offset of the wall clock in all processes that were started with `environ`, also in the one that moves it."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(8))
        self._file = file
        with open(file, "r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 8)

    def jump(self, offset_s: float) -> None:
        """To so many seconds from the system's clock."""
        struct.pack_into("<q", self._map, 0, round(offset_s * 1e9))

    def environ(self, library: Path) -> dict[str, str]:
        return {"LD_PRELOAD": str(library), FILE: str(self._file)}

    @classmethod
    def of_this_process(cls) -> "JumpingClock":
        return cls(Path(os.environ[FILE]))


def built(folder: Path) -> Path:
    """The library, compiled."""
    library = folder / "jumping_clock.so"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library
