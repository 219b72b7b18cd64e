"""Benchmark of gateways: figures are those of arithmetic, prompts meet their prefixes, and every system answers."""

import argparse

import pytest

from benchmarks.gateway_parts.figures import Figures, spread
from benchmarks.gateway_parts.sections import FAILED, PER_TOKEN, measure_replicas, measure_tokens
from benchmarks.gateway_parts.systems import BARE, Programs
from benchmarks.gateways import bundled_haproxy
from benchmarks.router_parts.load import PREFIX_TOKENS, info, prefixed_prompt
from benchmarks.router_parts.replica import cached_blocks
from holdfast.router.dispatch.prefix_index import PromptPrefix
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams


def test_a_ratio_is_made_of_two_figures_of_one_round():
    figures = Figures("us", beside="bare", of="us")
    for mine, bare in ((10.0, 10.0), (20.0, 1.0), (90.0, 30.0)):
        figures.note("bare", "us", bare)
        figures.note("router", "us", mine)
    cells = [list(column.cells) for column in figures.table().columns]
    assert cells == [["bare", "router"], ["10.0 [1.0..30.0]", "20 [10..90]"], ["", "3.0 [1.0..20.0]"]]
    assert spread([0.5]) == "0.50 [0.50..0.50]"


def test_prompts_begin_with_the_blocks_that_a_replica_has_cached():
    num_blocks = PREFIX_TOKENS // info().block_size
    cached = [cached_blocks(number, 3, 7) for number in range(3)]
    assert [len(blocks) // num_blocks for blocks in cached] == [3, 2, 2]
    for name in range(7):
        request = EngineRequest(
            request_id="", prompt_token_ids=prefixed_prompt(name, 99), sampling_params=SamplingParams(seed=1)
        )
        blocks = list(PromptPrefix(request).blocks(info().block_size))
        first = name // 3 * num_blocks
        assert blocks[:num_blocks] == cached[name % 3][first : first + num_blocks]
        assert blocks[num_blocks] not in cached[name % 3]


@pytest.mark.slow
def test_every_system_streams_and_answers():
    options = argparse.Namespace(
        streams=4, steps_per_s=20.0, seconds=0.5, rounds=1, rates=[20], sizes=[1, 3], prefixes=10
    )
    programs = Programs(haproxy=bundled_haproxy(), with_serve=False)
    tokens = measure_tokens(options, programs).values
    assert tokens.keys() == {BARE, "router", *programs.proxies}
    assert all(values[PER_TOKEN][0] > 0 for values in tokens.values())
    answers = measure_replicas(options, programs).values
    assert len(answers) == 1 + 2 * (1 + len(programs.proxies))
    assert all(values[FAILED] == [0] for values in answers.values())
