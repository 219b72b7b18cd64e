"""The collector around imports and loading: at rest inside, and blind afterwards to what was loaded, but not to its
garbage.
"""

import gc
import weakref
from collections.abc import Iterator

import pytest

from holdfast.worker.process_memory import importing, loading, set_aside, take_back


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()
    take_back()


class Node:
    def __init__(self) -> None:
        self.me = self


def test_it_rests_inside_and_frees_the_garbage_at_the_end() -> None:
    with loading():
        assert not gc.isenabled()
        kept, dropped = Node(), weakref.ref(Node())
        assert dropped() is not None
    assert gc.isenabled()
    assert dropped() is None
    assert gc.get_freeze_count() > 1000

    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is not None, "what was loaded is looked at again"
    take_back()
    gc.collect()
    assert gone() is None


def test_what_was_imported_is_old_at_once() -> None:
    with importing():
        kept = Node()
    assert any(one is kept for one in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0, "the garbage of an import is freed some day"

    set_aside()
    num_aside = gc.get_freeze_count()
    with importing():
        pass
    assert gc.get_freeze_count() > num_aside / 2, "what somebody else has set aside stays so"


def test_what_is_in_no_cycle_is_freed_as_ever() -> None:
    kept = Node()
    kept.me = None  # type: ignore[assignment]
    set_aside()
    gone = weakref.ref(kept)
    del kept
    assert gone() is None


def test_it_stays_as_it_was_after_a_failure_and_where_it_is_off() -> None:
    with pytest.raises(ValueError, match="no model"), loading():
        raise ValueError("no model")
    assert gc.isenabled()
    gc.disable()
    with loading():
        pass
    assert not gc.isenabled()
