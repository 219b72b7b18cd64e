"""The kept inputs once more: every decoder answers each of them as it documents, after so much work at most."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz.kinds import CORPUS, KINDS, corpus, opened

MAX_CALLS, CALLS_PER_BYTE = 60_000, 400
"""Calls of Python functions that an input may cost: so many, and more for each of its bytes."""
MAX_CORPUS = 300_000
"""Bytes of all inputs that are kept."""
OPENED_LATE = frozenset(("native",))
"""Kinds that take many seconds to open: left to the long run."""


class Work:
    """Counts calls of Python functions on this thread."""

    def __init__(self) -> None:
        self.num_calls = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.num_calls = 0
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: object, event: str, argument: object) -> None:
        self.num_calls += event == "call"


def num_calls(read: Callable[[bytes], None], kind: str, path: Path) -> int:
    """Calls that reading a kept input takes."""
    work = Work()
    try:
        with work.counted():
            read(path.read_bytes())
    except Exception as error:
        raise AssertionError(f"repeat it with: python -m tests.fuzz --repeat {kind} {path}") from error
    return work.num_calls


def replay(read: Callable[[bytes], None], kind: str) -> None:
    for path in corpus(kind):
        most = MAX_CALLS + CALLS_PER_BYTE * path.stat().st_size
        count = num_calls(read, kind, path)
        if count > most:
            count = num_calls(read, kind, path)  # without what a decoder imports when it is first used
        assert count <= most, f"{path}: {count} calls, {most} are allowed"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in OPENED_LATE else kind for kind in KINDS]
)
def test_kept_inputs_are_answered_as_documented(kind):
    with opened(kind) as read:
        replay(read, kind)


def test_the_corpus_is_small_and_has_all_kinds():
    assert sorted(path.name for path in CORPUS.iterdir()) == sorted(KINDS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < MAX_CORPUS
