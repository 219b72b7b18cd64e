"""Fuzzes one kind of input with Atheris: libFuzzer, guided by the coverage of Holdfast's Python code.

    python -m tests.fuzz.engine KIND [--library=avx2.so] FOLDER ... [-flag_of_libfuzzer=value ...]

New inputs that reach new code are written to the first folder, one that fails to `-artifact_prefix`.
"""

import sys
from pathlib import Path
from typing import Final

import atheris

LIBRARY: Final = "--library="


def main() -> None:
    kind, *words = sys.argv[1:]
    with atheris.instrument_imports(include=["holdfast"], enable_loader_override=False):
        from tests.fuzz.kinds import opened

        for word in words:
            if word.startswith(LIBRARY):
                from tests.worker.executors.cpu import sanitized

                sanitized.use(Path(word.removeprefix(LIBRARY)))
        target = opened(kind)  # kept until the engine ends the process, which leaves nothing
        read = target.__enter__()
    atheris.Setup([sys.argv[0], *(word for word in words if not word.startswith(LIBRARY))], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
