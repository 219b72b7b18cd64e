"""The schedule of a case: who runs when, on which prompts, and which rounds count. Nothing is started or timed."""

from dataclasses import replace

import pytest

from benchmarks.peers.alternation import Alternation, Limits
from benchmarks.peers.cases import CASES, Case, chosen_cases, prompts
from benchmarks.peers.machine import Usage
from benchmarks.peers.server import Answer, ServerError

CASE = Case(name="a", num_requests=2, num_prompt_tokens=8, max_tokens=10)
LIMITS = Limits(rounds=3, patience_s=100.0, least_s=0.0, noise=0.06, repeats=2)


class Scripted:
    """A server whose runs take the seconds that are listed, the last for ever, and which writes down who was asked."""

    def __init__(self, name, asked, seconds=(1.0,), others=(0.0,), fails_at=None):
        self.name = name
        self._asked = asked
        self._seconds = list(seconds)
        self._others = list(others)
        self._fails_at = fails_at

    def ask(self, case, prompts, max_tokens, *, split=False, sampling=None):
        number = sum(name == self.name for name, _ in self._asked)
        self._asked.append((self.name, prompts))
        if number == self._fails_at:
            raise ServerError(self.name, "died")
        seconds = self._seconds[min(number, len(self._seconds) - 1)]
        usage = Usage(ours=1.0, others=self._others[min(number, len(self._others) - 1)])
        parts = {"prefill": seconds / 4, "decode": seconds * 3 / 4}
        return Answer(ids=[], seconds=seconds, parts=parts, usage=usage)


def measure(ours, peers, limits=LIMITS, case=CASE):
    settled, said = [], []
    alternation = Alternation(ours, peers, 8192, limits, settle=lambda: settled.append(1), say=said.append)
    return alternation.measure(case), len(settled), said


def test_every_run_of_a_peer_is_followed_by_one_of_ours_with_the_same_prompts():
    asked = []
    measure(Scripted("ours", asked), [Scripted("p", asked), Scripted("q", asked)])
    assert [name for name, _ in asked[:3]] == ["ours", "p", "q"], "the warm-ups"
    rounds = asked[3:-1]
    assert [name for name, _ in rounds] == ["p", "ours", "q", "ours"] * 3
    assert all(theirs == ours for (_, theirs), (_, ours) in zip(rounds[::2], rounds[1::2], strict=True))
    distinct = {str(ids) for _, ids in rounds}
    assert len(distinct) == len(rounds) // 2, "no cache has seen a round's prompts, but for its pair"


def test_medians_spread_and_ratios_are_those_of_the_pairs():
    asked = []
    ours = Scripted("ours", asked, seconds=(9, 1.0, 2.0, 4.0))
    result, *_ = measure(ours, [Scripted("p", asked, seconds=(9, 2.0, 2.0, 2.0))])
    one = result.comparisons["p"]
    assert (one.rate.median, one.rate.least, one.rate.most) == (10.0, 10.0, 10.0), "20 tokens in 2 s"
    assert (result.our_rate.median, result.our_rate.least, result.our_rate.most) == (10.0, 5.0, 20.0)
    assert (one.ratio.median, one.ratio.least, one.ratio.most) == (1.0, 0.5, 2.0)
    assert result.our_parts == {"prefill": 1.0, "decode": 3.0}, "of a burst after the rounds"


def test_a_round_that_others_disturbed_is_dropped_and_repeated():
    asked = []
    peer = Scripted("p", asked, seconds=(1, 50.0, 1.0), others=(0.0, 0.5, 0.0))
    result, num_settled, said = measure(Scripted("ours", asked), [peer])
    one = result.comparisons["p"]
    assert (len(one.pairs), len(one.dropped), result.num_dropped, num_settled) == (3, 1, 1, 1)
    assert one.rate.least == 20.0, "the slow one does not count"
    assert not one.is_noisy
    assert sum("dropped" in line for line in said) == 1


def test_noise_in_our_own_run_drops_the_pair_as_well():
    asked = []
    ours = Scripted("ours", asked, others=(0.0, 0.5, 0.0))
    assert measure(ours, [Scripted("p", asked)])[0].num_dropped == 1


def test_repeats_are_bounded_and_what_is_kept_then_is_marked():
    asked = []
    result, *_ = measure(Scripted("ours", asked), [Scripted("p", asked, others=(0.0, 0.5))])
    one = result.comparisons["p"]
    assert (len(one.pairs), len(one.dropped), one.is_noisy) == (3, LIMITS.repeats, True)


@pytest.mark.parametrize(("patience_s", "num_pairs", "is_first"), [(13.0, 3, False), (9.5, 2, False), (5.0, 1, True)])
def test_a_slow_peer_gets_the_rounds_for_which_there_is_patience(patience_s, num_pairs, is_first):
    asked = []
    limits = replace(LIMITS, patience_s=patience_s)
    result, *_ = measure(Scripted("ours", asked), [Scripted("p", asked, seconds=(3.0,))], limits)
    one = result.comparisons["p"]
    assert (len(one.pairs), one.is_first_run) == (num_pairs, is_first)
    assert one.rate.median == pytest.approx(20 / 3)


def test_short_bursts_are_repeated_until_a_run_can_be_timed():
    asked = []
    limits = replace(LIMITS, least_s=0.5, rounds=1)
    result, *_ = measure(Scripted("ours", asked, seconds=(0.125,)), [Scripted("p", asked, seconds=(0.25,))], limits)
    one = result.comparisons["p"]
    assert result.num_bursts == 4
    assert (one.pairs[0].theirs.seconds, one.pairs[0].theirs.num_tokens) == (1.0, 80)
    assert one.pairs[0].theirs.parts == {"prefill": 0.25, "decode": 0.75}


def test_a_peer_that_fails_is_left_out_and_the_others_go_on():
    asked = []
    failing = Scripted("p", asked, fails_at=2)
    result, *_ = measure(Scripted("ours", asked), [failing, Scripted("q", asked)])
    assert (len(result.comparisons["p"].pairs), len(result.comparisons["q"].pairs)) == (1, 3)
    assert "died" in result.comparisons["p"].error
    assert result.best_peer in ("p", "q")


def test_a_failure_of_ours_ends_the_benchmark():
    asked = []
    with pytest.raises(ServerError, match="ours"):
        measure(Scripted("ours", asked, fails_at=2), [Scripted("p", asked)])


def test_without_peers_ours_is_measured_alone():
    asked = []
    result, *_ = measure(Scripted("ours", asked, others=(0.0, 0.5, 0.0)), [])
    assert (len(result.our_runs), result.num_dropped, result.best_peer) == (3, 1, None)


def test_cold_prefixes_are_new_and_warm_ones_are_kept():
    for name, is_kept in (("e_cold", False), ("e_warm", True)):
        first, second = (prompts(CASES[name], 8192, burst) for burst in ("x", "y"))
        assert len({tuple(ids[:512]) for ids in first}) == 1
        assert (first[0][:512] == second[0][:512]) is is_kept
        assert first[0][512:] != second[0][512:]
        assert first == prompts(CASES[name], 8192, "x")
        assert {len(ids) for ids in first} == {544}


def test_names_of_cases_are_checked():
    assert [case.name for case in chosen_cases("a,e")] == ["a", "e_cold", "e_warm"]
    with pytest.raises(ValueError, match="no such case: z"):
        chosen_cases("a,z")
