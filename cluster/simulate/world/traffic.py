"""Traffic of one simulation, drawn from its seed: short requests, many, of every kind that failover must survive."""

import random
from dataclasses import replace
from typing import Any

from holdfast.cluster.simulate.actors.client import PlannedRequest
from holdfast.cluster.simulate.oracle.oracle import expected_completion
from holdfast.cluster.simulate.oracle.pseudo_model import POISON_TOKEN_ID, VOCAB_SIZE, WHOLE_TOKEN_IDS
from holdfast.worker.request import EngineRequest, KeptPrefix, Priority
from holdfast.worker.sampling_params import SamplingParams

_GRAMMARS = ("ab:cde:2", "ab:cdefgh:3", "ch:abdefg:4", "gh:a:1")
_STOPS = ("ab", "ba", "cd", "abc", "dd", "e", "éa", "a.", "hgf", "bb ")
LONGEST_S = 600.0
"""Timeout of clients that would rather wait: longer than any simulation takes."""
LONGEST_PIN_S = 8
"""Longest time for which a prompt is asked to be kept: at the end of a simulation all of them are over."""
GRACE_S = 5.0
"""Seconds after its time that some of a storm's clients still listen for the router to say that it is up."""


def draw_requests(
    rng: random.Random,
    num_requests: int,
    span_s: float,
    max_model_len: int,
    *,
    are_plain: bool = False,
    before: int = 0,
) -> list[PlannedRequest]:
    """Requests over `span_s` seconds, some of them all at once, some with a common beginning. Plain ones are greedy and
    ask for nothing that looks at logits: replicas decode them by several steps. `before`: tokens that common beginnings
    have more.
    """
    prefixes = [tuple(rng.choices(WHOLE_TOKEN_IDS, k=before + rng.randint(1, 12))) for _ in range(3)]
    burst_s = rng.uniform(0, span_s)
    burst_share = rng.choice((0.0, 0.0, 0.3, 0.7))
    requests = []
    for number in range(num_requests):
        arrival_s = burst_s if rng.random() < burst_share else rng.uniform(0, span_s)
        request = _draw_request(rng, f"request-{number}", rng.choice(prefixes), max_model_len, are_plain)
        requests.append(
            PlannedRequest(
                request=request,
                arrival_s=arrival_s,
                timeout_s=rng.uniform(0.05, 3.0) if rng.random() < 0.05 else LONGEST_S,
                cancel_after=rng.randint(0, 6) if rng.random() < 0.05 else None,
            )
        )
    for number in range(rng.choice((0,) * 8 + (1, 2))):
        requests.append(_draw_poison(rng, f"poison-{number}", rng.uniform(0, span_s)))
    return requests


def draw_sessions(rng: random.Random, span_s: float, max_model_len: int) -> list[PlannedRequest]:
    """Draws conversations in one simulation of three: each turn begins with the turn before it and its answer, and most
    ask for their prompt to be kept. A turn comes whether the answer has come or not: which one it is, is known.
    """
    if rng.random() < 2 / 3:
        return []
    planned = []
    for number in range(rng.randint(1, 4)):
        prompt: tuple[int, ...] = ()
        tenant, arrival_s = rng.choice(("", "gold", "free")), rng.uniform(0, span_s)
        for turn in range(rng.randint(2, 5)):
            prompt += tuple(rng.choices(WHOLE_TOKEN_IDS, k=rng.randint(1, 6)))
            request = EngineRequest(
                request_id=f"session-{number}-{turn}",
                session_id=f"session-{number}",
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(seed=rng.getrandbits(40), max_tokens=rng.randint(1, 8)),
                tenant=tenant,
                cache_ttl_s=rng.choice((0, 2, LONGEST_PIN_S)),
            )
            if len(prompt) >= max_model_len - 1:
                break
            planned.append(PlannedRequest(request=request, arrival_s=arrival_s, timeout_s=LONGEST_S, cancel_after=None))
            prompt += expected_completion(request, max_model_len).token_ids
            arrival_s += rng.choice((0.3, 2.0)) * rng.random()
    return planned


def with_pins(rng: random.Random, requests: list[PlannedRequest]) -> list[PlannedRequest]:
    """The same in which some ask that their prompts stay cached, in one simulation of three."""
    if rng.random() < 2 / 3:
        return requests
    share = rng.choice((0.1, 0.5, 1.0))
    return [replace(one, request=_keeping(rng, one.request)) if rng.random() < share else one for one in requests]


def _keeping(rng: random.Random, request: EngineRequest) -> EngineRequest:
    length = len(request.prompt_token_ids)
    marks = [KeptPrefix(rng.randint(1, length), rng.randint(1, LONGEST_PIN_S)) for _ in range(rng.choice((0, 0, 1, 3)))]
    ttl_s, num_tokens = rng.choice((0, 1, LONGEST_PIN_S)), rng.choice((0, rng.randint(1, length)))
    return replace(request, cache_ttl_s=ttl_s, cache_prefix_tokens=num_tokens, cache_marks=tuple(marks))


def draw_storm(rng: random.Random, span_s: float) -> list[PlannedRequest]:
    """Draws a storm in one simulation of four: dozens of requests at once, with 1 ms to 1 s to live, many of which run
    out together.
    """
    if rng.random() < 0.75:
        return []
    begin_s, length_s, shortest_s = rng.uniform(0, span_s), rng.choice((0.0, 0.01, 0.3)), rng.choice((0.001, 0.1))
    return [
        PlannedRequest(
            request=EngineRequest(
                request_id=f"storm-{number}",
                prompt_token_ids=tuple(rng.choices(WHOLE_TOKEN_IDS, k=rng.randint(1, 4))),
                sampling_params=SamplingParams(seed=rng.getrandbits(40), max_tokens=24, ignore_eos=True),
            ),
            arrival_s=begin_s + rng.uniform(0, length_s),
            timeout_s=shortest_s * (1.0 / shortest_s) ** rng.random(),
            cancel_after=None,
            grace_s=rng.choice((0.0, GRACE_S)),
        )
        for number in range(rng.randint(20, 60))
    ]


def _draw_poison(rng: random.Random, request_id: str, arrival_s: float) -> PlannedRequest:
    """A request that kills the replicas that run it, soon or a little later."""
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=(POISON_TOKEN_ID, *rng.choices(WHOLE_TOKEN_IDS, k=3)),
        sampling_params=SamplingParams(seed=rng.getrandbits(40), max_tokens=16, ignore_eos=True),
    )
    return PlannedRequest(request=request, arrival_s=arrival_s, timeout_s=LONGEST_S, cancel_after=None, is_poison=True)


def _draw_request(
    rng: random.Random, request_id: str, prefix: tuple[int, ...], max_model_len: int, is_plain: bool
) -> EngineRequest:
    prompt = (prefix if rng.random() < 0.5 else ()) + tuple(rng.choices(WHOLE_TOKEN_IDS, k=rng.randint(1, 8)))
    params, of_logits = _draw_params(rng), {**_draw_logits_settings(rng), **_draw_reports(rng)}
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt[: max_model_len - 1],
        sampling_params=replace(params, **of_logits),
        priority=rng.choice((Priority.NORMAL, Priority.NORMAL, Priority.HIGH, Priority.LOW)),
        cache_salt=rng.choice(("", "", "", "other")),
        tenant=rng.choice(("", "", "gold", "free")),
        bad_word_token_ids=_draw_bad_words(rng) if rng.random() < 0.06 else (),
        grammar=rng.choice(_GRAMMARS) if rng.random() < 0.12 else "",
    )
    if is_plain:
        params = replace(params, temperature=0.0, min_tokens=0)
        return replace(request, sampling_params=params, bad_word_token_ids=(), grammar="")
    return request


def _draw_params(rng: random.Random) -> SamplingParams:
    max_tokens = min(24, 1 + int(rng.expovariate(0.15)))
    stops = rng.random() < 0.3
    return SamplingParams(
        seed=rng.getrandbits(40),
        temperature=0.0 if rng.random() < 0.1 else 1.0,
        n=rng.randint(2, 4) if rng.random() < 0.1 else 1,
        max_tokens=None if rng.random() < 0.02 else max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.1 else 0,
        stop=rng.sample(_STOPS, rng.randint(1, 3)) if stops else (),
        include_stop_str_in_output=stops and rng.random() < 0.3,
        stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.1 else (),
        ignore_eos=rng.random() < 0.3,
    )


def _draw_logits_settings(rng: random.Random) -> dict[str, Any]:
    """Settings that change the draws. All numbers are sums of few powers of two, so that no order of adding shows."""
    chosen: dict[str, Any] = {}
    if rng.random() < 0.15:
        chosen["repetition_penalty"] = rng.choice((0.5, 1.0, 2.0))
        chosen["frequency_penalty"] = rng.choice((-1.0, 0.0, 0.5, 2.0))
        chosen["presence_penalty"] = rng.choice((-0.5, 0.0, 1.5))
    if rng.random() < 0.06:
        chosen["logit_bias"] = {rng.randrange(VOCAB_SIZE): rng.choice((-100.0, -4.0, 2.5, 6.0)) for _ in range(4)}
    if rng.random() < 0.06:
        chosen["allowed_token_ids"] = rng.sample(range(VOCAB_SIZE), rng.randint(1, 8))
    return chosen


def _draw_reports(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters that report log-probabilities."""
    return {
        "logprobs": rng.choice((0, 1, 2, 5)) if rng.random() < 0.2 else None,
        "prompt_logprobs": rng.choice((0, 1, 3)) if rng.random() < 0.1 else None,
    }


def _draw_bad_words(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Some of a single token; others end in a token that is drawn often enough after the one before."""
    return tuple(tuple(rng.choices(WHOLE_TOKEN_IDS, k=rng.randint(1, 2))) for _ in range(rng.randint(1, 8)))
