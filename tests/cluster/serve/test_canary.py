"""Verdicts over canaries, from counts."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from holdfast.cluster.serve.canary import Observed, chance_of_at_least, read_known_answers, since, summed, verdict
from holdfast.cluster.serve.router_update import tokenizer_digest
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.worker.errors import ConfigurationError


def counts(version: str = "new", **numbers: float) -> VersionCounts:
    return VersionCounts(model="m", version=version, **numbers)


def judged(canary: VersionCounts, others: VersionCounts, *wrong: str) -> str:
    return verdict(Observed(canary=canary, others=others, wrong_answers=wrong)) or ""


OTHERS = counts("old", num_finished=1000, num_failed=10, num_first_tokens=1000, first_token_s=100.0)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (counts(), ""),
        (counts(num_finished=100), ""),
        (counts(num_finished=99, num_failed=1), ""),
        (counts(num_finished=0, num_failed=1), ""),
        (counts(num_finished=0, num_failed=2), "2 of 2 requests failed"),
        (counts(num_finished=90, num_failed=10), "10 of 100 requests failed, and 10 of 1010"),
        (counts(num_finished=50, num_lost=1), ""),
        (counts(num_finished=50, num_lost=2), "2 of its replicas were lost"),
        (counts(num_finished=50, num_first_tokens=50, first_token_s=9.0), ""),
        (counts(num_finished=50, num_first_tokens=50, first_token_s=11.0), "0.220 s on average, and 0.100 s"),
        (counts(num_finished=50, num_first_tokens=19, first_token_s=99.0), ""),
    ],
)
def test_a_canary_is_taken_back_for_what_chance_does_not_explain(seen: VersionCounts, message: str):
    reason = judged(seen, OTHERS)
    assert message in reason
    assert bool(message) == bool(reason)


def test_one_wrong_answer_is_enough():
    assert judged(counts(), OTHERS, "'1+1' gave '3'") == "1 wrong answers: '1+1' gave '3'"


def test_it_is_compared_with_how_the_others_do():
    bad = counts("old", num_finished=800, num_failed=200)
    assert judged(counts(num_finished=80, num_failed=20), bad) == ""
    assert "failed" in judged(counts(num_finished=80, num_failed=20), OTHERS)


@pytest.mark.parametrize("number", [0, 1, 7, 40])
def test_chances_are_those_of_request_after_request(number: int):
    """One request at a time: the chances of every number of failures, as exact fractions."""
    share, exact = Fraction(1, 10), [Fraction(1)]
    for _ in range(number):
        failed, went_well = [0, *(share * one for one in exact)], [*((1 - share) * one for one in exact), 0]
        exact = [one + other for one, other in zip(failed, went_well, strict=True)]
    for num_failed in range(number + 2):
        expected = float(sum(exact[num_failed:]))
        assert chance_of_at_least(num_failed, number, 0.1) == pytest.approx(expected, abs=1e-12)


def test_chances_of_many_requests_do_not_overflow():
    assert chance_of_at_least(1000, 1_000_000, 0.001) == pytest.approx(0.5, abs=0.02)


def test_counts_of_all_routers_are_added_and_those_from_before_taken_off():
    routers = [counts(num_finished=3, num_failed=1), counts(num_finished=4), counts("old", num_finished=9)]
    total = summed("m", "new", routers)
    assert (total.num_finished, total.num_failed) == (7, 1)
    assert since(total, counts(num_finished=5, num_failed=2)) == counts(num_finished=2)


def test_known_answers_are_read_and_refused_with_the_field(tmp_path: Path):
    path = tmp_path / "known.json"
    path.write_text(json.dumps([{"prompt": "a", "starts_with": "b"}]))
    (known,) = read_known_answers(path)
    assert (known.prompt, known.starts_with, known.num_tokens) == ("a", "b", 16)
    for text, message in (('[{"prompt": "a"}]', "starts_with"), ("[]", "one at least"), ("{", "--known-answers")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            read_known_answers(path)


def test_a_tokenizer_is_told_from_another_but_not_by_its_chat_template(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "x"}')
    first = tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "y", "bos_token": "<s>"}')
    assert tokenizer_digest(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    assert tokenizer_digest(tmp_path) != first
