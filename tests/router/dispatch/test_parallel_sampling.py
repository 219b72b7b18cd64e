"""Which requests several completions become, and which of them are the best."""

import math

from holdfast.router.dispatch.request_state import best, siblings
from holdfast.router.generation import Usage, together
from holdfast.worker.parameters import MAX_SEED
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams


def request(**params) -> EngineRequest:
    sampling = SamplingParams(**{"seed": 5, **params})
    return EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling_params=sampling, cache_salt="salt")


def test_one_completion_is_the_request_itself():
    one = request(temperature=0.5)
    assert siblings(one) == (one,)


def test_siblings_differ_in_index_and_seed_alone():
    three = siblings(request(n=3, temperature=0.5))
    assert [sibling.sequence_key for sibling in three] == [("", "r", 0, index) for index in range(3)]
    assert [sibling.sampling_params for sibling in three] == [
        SamplingParams(seed=seed, temperature=0.5) for seed in (5, 6, 7)
    ]
    assert {(sibling.group_id, sibling.prompt_token_ids, sibling.cache_salt) for sibling in three} == {
        (("", "r", 0), (1, 2), "salt")
    }


def test_seeds_begin_again_after_the_largest():
    assert [one.sampling_params.seed for one in siblings(request(n=2, seed=MAX_SEED))] == [MAX_SEED, 0]


def test_the_first_alone_reports_on_the_prompt():
    assert [one.sampling_params.prompt_logprobs for one in siblings(request(n=3, prompt_logprobs=2))] == [2, None, None]


def test_a_ranking_has_log_probabilities_whether_or_not_they_were_asked_for():
    assert [one.sampling_params.logprobs for one in siblings(request(n=1, best_of=2))] == [0, 0]
    assert [one.sampling_params.logprobs for one in siblings(request(n=1, best_of=2, logprobs=3))] == [3, 3]
    assert [one.sampling_params.logprobs for one in siblings(request(n=2, best_of=2))] == [None, None]


def test_the_best_have_the_highest_mean_and_of_equal_ones_the_first_wins():
    sums = [[-1.0, -1.0, -1.0], [-2.0], [-0.5, -1.5], [], [-0.1]]
    assert best(sums, 5) == [4, 0, 2, 1, 3]
    assert best(sums, 2) == [4, 0]
    assert best([[-math.inf], [-9.0]], 1) == [1]


def test_the_prompt_is_paid_for_once():
    usages = [
        Usage(num_prompt_tokens=7, num_completion_tokens=number, num_cached_tokens=4 * number) for number in (1, 2, 3)
    ]
    assert together(usages, share_prompt=True) == Usage(
        num_prompt_tokens=7, num_completion_tokens=6, num_cached_tokens=4
    )
