"""What requests at random ask for, and what each must get, worked out in advance by brute force."""

from hypothesis import strategies as st

from holdfast.worker.request import EngineRequest, FinishReason, Priority, TokenDelta
from holdfast.worker.scheduler.sequence import Sequence
from tests.pseudo_model import pseudo_prompt_logprobs

VOCAB_SIZE, EOS = 60, 0


class Expected:
    """What one request must get, worked out in advance by brute force, and what it has got so far."""

    def __init__(self, request: EngineRequest, outputs: list[int], sequence: Sequence | None) -> None:
        self.request = request
        self.outputs = outputs
        self.sequence = sequence
        self.received = list(request.output_token_ids)
        self.num_cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.has_expired = False

    @property
    def is_alive(self) -> bool:
        return self.finish_reason is None and not self.has_expired

    @property
    def stop_ids(self) -> set[int]:
        params = self.request.sampling_params
        return {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})

    def take(self, delta: TokenDelta) -> None:
        assert self.is_alive, "a request ends once"
        assert delta.first_token_index == len(self.received), "indices go on without gap or overlap"
        assert delta.token_ids or delta.finish_reason, "a delta says something"
        is_first = bool(delta.token_ids) and not self.received
        if is_first and self.request.group_id:
            assert delta.num_cached_tokens <= self.num_cached_tokens
        else:
            assert delta.num_cached_tokens == (self.num_cached_tokens if is_first else 0)
        asks = self.request.sampling_params.prompt_logprobs is not None
        message = pseudo_prompt_logprobs(self.request.prompt_token_ids, VOCAB_SIZE) if is_first and asks else []
        assert list(delta.prompt_logprobs) == message
        self.received += delta.token_ids
        self.finish_reason = delta.finish_reason
        assert self.received == self.outputs[: len(self.received)]
        if self.finish_reason is FinishReason.ABORT:
            return
        ended = len(self.received) == len(self.outputs)
        reason = FinishReason.STOP if self.outputs[-1] in self.stop_ids else FinishReason.LENGTH
        assert delta.finish_reason == (reason if ended else None)


strangers = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12).map(tuple)

relatives = st.builds(
    lambda length, tail: (*range(length), *tail), st.integers(4, 12), st.lists(st.integers(0, 3), max_size=3)
)

prompts = st.one_of(strangers, relatives, relatives)
"""Prompts at random, and such that have their beginnings in common."""

wishes = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "turn_of": st.none() | st.integers(0, 30),
        "salt": st.sampled_from(["", "", "", "tenant"]),
        "max_tokens": st.sampled_from([1, 2, 4, 9, 16, 17, 24, None]),
        "stop_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        "ignore_eos": st.sampled_from([True, True, False]),
        "seed": st.integers(0, 3),
        "priority": st.sampled_from(Priority),
        "num_before": st.lists(st.sampled_from([0, 0, 0, 0, 1, 5, 24]), min_size=1, max_size=4),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "time_left_s": st.sampled_from([None, None, None, 0.0, 2.0, 30.0]),
    }
)
"""What a request asks for, whose prompt and tokens come before its own, and for each of its sequences, how many tokens
another replica has emitted before."""
