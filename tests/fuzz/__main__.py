"""Fuzzes all decoders, one kind of input after the other, and keeps the inputs that reach new code.

    python -m tests.fuzz --minutes 10                    # all kinds; exit code 1 if an input failed
    python -m tests.fuzz --kinds http1,http2 --minutes 1
    python -m tests.fuzz --repeat http1 build/fuzz/failures/http1/crash-1f2e3d
    python -m tests.fuzz --keep                          # adds what reaches new code to tests/fuzz/corpus

Inputs grow in `build/fuzz`.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.cluster.progress_bars import progress
from tests.fuzz.kinds import CORPUS, DEFAULT_MAX_BYTES, KINDS, MAX_BYTES, opened
from tests.worker.executors.cpu import sanitized

GROWN: Final = Path("build/fuzz")
INPUT_S: Final = 25
"""An input that takes longer has failed."""
START_S: Final = 180
"""Beside its time, what a run may take to start, and to read its corpus."""
MAX_FAILURES: Final = 5
"""Of a kind: the run of a kind that has failed goes on so often."""
KEPT_BYTES: Final = 1024
"""A larger input stays out of the repository."""
NATIVE: Final = "native"
TAIL: Final = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An input that was not answered as documented."""

    kind: str
    path: Path | None
    """None: the run itself ended."""
    told: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--repeat", nargs=2, metavar=("KIND", "FILE"), help="give one input to its decoder")
    parser.add_argument("--keep", action="store_true", help="add grown inputs that reach new code to the repository")
    given = parser.parse_args()
    if given.repeat:
        kind, path = given.repeat
        with opened(kind) as read:
            read(Path(path).read_bytes())
        return 0
    kinds = given.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds {given.kinds}: no kind is called {', '.join(sorted(unknown))}")
    if given.keep:
        for kind in kinds:
            keep(kind)
        return 0
    return report(run_all(kinds, 60 * given.minutes / len(kinds)))


def run_all(kinds: list[str], each_s: float) -> list[Failed]:
    failures: list[Failed] = []
    with progress(sys.stderr) as tell:
        for number, kind in enumerate(kinds):
            tell("fuzzing", number, len(kinds))
            failures += fuzz(kind, each_s)
        tell("fuzzing", len(kinds), len(kinds))
    return failures


def fuzz(kind: str, seconds: float) -> list[Failed]:
    """Runs a kind for some time, again after an input that failed."""
    failures: list[Failed] = []
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0 and len(failures) < MAX_FAILURES:
        failed = fuzz_once(kind, max(1, int(left_s)))
        if failed is None:
            break
        failures.append(failed)
    return failures


def fuzz_once(kind: str, seconds: int) -> Failed | None:
    grown, failed = GROWN / "corpus" / kind, GROWN / "failures" / kind
    for folder in (grown, failed):
        folder.mkdir(parents=True, exist_ok=True)
    before = set(failed.iterdir())
    flags = (f"-max_total_time={seconds}", f"-timeout={INPUT_S}", f"-artifact_prefix={failed}/", "-rss_limit_mb=4096")
    done = run_engine(kind, [str(grown), str(CORPUS / kind), *flags, "-print_final_stats=1"], seconds)
    if done.returncode == 0:
        return None
    new = sorted(set(failed.iterdir()) - before)
    return Failed(kind=kind, path=new[0] if new else None, told=done.stdout[-TAIL:])


def keep(kind: str) -> None:
    """Adds those of the small grown inputs to the repository that reach code which no input there reaches."""
    if (GROWN / "corpus" / kind).is_dir():
        small = [path for path in (GROWN / "corpus" / kind).iterdir() if path.stat().st_size <= KEPT_BYTES]
        staged = GROWN / "staged" / kind
        staged.mkdir(parents=True, exist_ok=True)
        for path in small:
            (staged / path.name).write_bytes(path.read_bytes())
        done = run_engine(kind, [str(CORPUS / kind), str(staged), "-merge=1"], START_S)
        print(f"{kind}: {done.stdout.splitlines()[-1] if done.returncode == 0 else done.stdout[-TAIL:]}")


def run_engine(kind: str, words: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    """In a process of its own, whose end the last lines of its output tell."""
    environment: Mapping[str, str] | None = None
    if kind == NATIVE and sanitized.is_possible():
        library = sanitized.compiled(GROWN / "sanitized", "avx2")
        words = [f"--library={library.resolve()}", *words]
        environment = sanitized.environment()
    words = [f"-max_len={MAX_BYTES.get(kind, DEFAULT_MAX_BYTES)}", *words]
    command = [sys.executable, "-m", "tests.fuzz.engine", kind, *words]
    try:
        return subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds + START_S,
        )
    except subprocess.TimeoutExpired as expired:
        message = (expired.stdout or b"").decode(errors="replace") if isinstance(expired.stdout, bytes) else ""
        return subprocess.CompletedProcess(command, 1, stdout=f"{message}\nit did not end")


def report(failures: list[Failed]) -> int:
    for failed in failures:
        where = "its run ended" if failed.path is None else str(failed.path)
        print(f"{failed.kind}: {where}\n{failed.told}")
        if failed.path is not None:
            print(f"repeat it with: python -m tests.fuzz --repeat {failed.kind} {failed.path}\n")
    num_grown = sum(1 for _ in (GROWN / "corpus").rglob("*") if _.is_file())
    print(f"{len(failures)} inputs failed; {num_grown} inputs in {GROWN / 'corpus'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
