"""What a router keeps of its log for a state dump, and that a record it cannot read disturbs nobody."""

import logging

import pytest

from holdfast.router.api.operators import MAX_LENGTH, RecentErrors


@pytest.fixture
def kept():
    handler, logger = RecentErrors(), logging.getLogger("holdfast.recent")
    logger.addHandler(handler)
    yield logger, handler
    logger.removeHandler(handler)


def test_warnings_and_errors_are_kept_with_the_class_of_their_exception(kept):
    logger, handler = kept
    logger.info("nothing")
    logger.warning("%s failed: %s", "a command", "it was late", exc_info=False)
    try:
        raise ValueError("a prompt of a client")
    except ValueError:
        logger.exception("broken " + "x" * MAX_LENGTH)
    logger.error("without", exc_info=True)
    first, second, third = handler.lines
    assert first.endswith("WARNING holdfast.recent: a command failed: it was late")
    assert "a prompt of a client" not in second
    assert len(second) == MAX_LENGTH
    assert third.endswith("ERROR holdfast.recent: without")


def test_a_record_that_cannot_be_read_disturbs_nobody(kept, monkeypatch):
    logger, handler = kept
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.error("%d of %d", 1)
    logger.error("next")
    assert [line.rpartition(": ")[2] for line in handler.lines] == ["next"]
