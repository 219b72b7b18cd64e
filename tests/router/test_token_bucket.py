"""A bucket says what a rate allows: filled by time and by what is given, never beyond its capacity."""

import pytest

from holdfast.router.token_bucket import BURST_S, TokenBucket


def test_it_is_filled_by_time_and_by_what_is_given():
    bucket = TokenBucket(per_s=4, capacity=2)
    for _ in range(2):
        assert bucket.wait_s(10.0, 1.0) == 0
        bucket.take(1.0, 10.0)
    assert bucket.wait_s(10.0, 1.0) == 0.25
    assert bucket.ready_at(1.0) == 10.25
    bucket.give(0.5)
    assert bucket.ready_at(1.0) == 10.125
    assert bucket.wait_s(10.1, 1.0)
    assert not bucket.wait_s(10.125, 1.0)
    assert bucket.ready_at(1.0) is None


def test_it_holds_no_more_than_its_capacity():
    bucket = TokenBucket(per_s=4, capacity=2)
    bucket.wait_s(0.0, 1.0)
    for _ in range(10):
        bucket.give(0.5)
    assert not bucket.wait_s(1000.0, 2.0)
    assert bucket.wait_s(1000.0, 2.5)
    bucket.take(2.0, 1000.0)
    assert bucket.wait_s(1000.0, 1.0)


def test_it_holds_ten_seconds_of_its_rate_and_one_at_least():
    assert TokenBucket(5.0).wait_s(0.0, 5.0 * BURST_S) == 0
    assert TokenBucket(5.0).wait_s(0.0, 5.0 * BURST_S + 1) == pytest.approx(0.2)
    assert TokenBucket(0.01).wait_s(0.0, 1.0) == 0


def test_time_that_goes_backwards_fills_no_bucket():
    bucket = TokenBucket(1.0)
    bucket.take(10, 100.0)
    assert bucket.wait_s(50.0, 1.0) == pytest.approx(1.0)
    assert bucket.wait_s(101.0, 1.0) == 0.0
