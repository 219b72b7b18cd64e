"""The inbox: commands come out in order, and none gets in after it was closed."""

import pytest

from holdfast.worker.engine.inbox import Inbox
from holdfast.worker.errors import ReplicaError


def test_commands_come_out_in_the_order_in_which_they_came():
    inbox, done = Inbox(), []
    for number in range(3):
        inbox.put(lambda number=number: done.append(number))
    for command in inbox.take(wait_s=1.0):
        command()
    assert done == [0, 1, 2]
    assert inbox.is_empty
    assert inbox.take(wait_s=0.001) == inbox.take() == []


def test_a_closed_inbox_takes_nothing_and_says_why():
    inbox, done = Inbox(), []
    inbox.put(lambda: done.append("in time"))
    assert inbox.close(ReplicaError("the end"))
    with pytest.raises(ReplicaError, match="the end"):
        inbox.put(lambda: done.append("late"))
    inbox.put_unless_closed(lambda: done.append("late"))
    for command in inbox.take():
        command()
    assert done == ["in time"]


def test_of_two_reasons_the_first_counts():
    inbox, first = Inbox(), ReplicaError("first")
    assert inbox.closed_by is None
    assert inbox.close(first)
    assert not inbox.close(ReplicaError("second"))
    assert inbox.closed_by is first
