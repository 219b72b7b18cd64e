"""Sending by layers gains what a hand would reckon."""

import pytest

from benchmarks.layered_sending import gain
from holdfast.worker.scheduler.step_time import StepCosts

COSTS = StepCosts(base_s=0.0, decode_s=0.0, token_s=0.01, context_token_s=0.0)


@pytest.mark.parametrize(
    ("bytes_per_s", "by_blocks_s", "by_layers_s"),
    [(200.0, 0.5, 0.05), (50.0, 2.0, 1.1)],
    ids=["the link is faster than the steps", "the link is slower"],
)
def test_one_chunk_of_ten_layers(bytes_per_s, by_blocks_s, by_layers_s):
    """100 tokens of a byte take a second to compute: the link is free from the end of the first layer on."""
    found = gain(COSTS, 100, 100, 10, 1.0, bytes_per_s * 8 / 1e9)
    assert found.ttft_s == pytest.approx(1.0)
    assert (found.by_blocks_s, found.by_layers_s) == pytest.approx((by_blocks_s, by_layers_s))
    assert found.share == pytest.approx((by_blocks_s - by_layers_s) / (1.0 + by_blocks_s))


def test_of_many_chunks_only_the_last_ones_transfer_is_gained():
    found = gain(COSTS, 400, 100, 10, 1.0, 200 * 8 / 1e9)
    assert (found.by_blocks_s, found.by_layers_s) == pytest.approx((0.5, 0.05))
