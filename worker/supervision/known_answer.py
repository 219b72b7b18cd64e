"""Known answer: a fixed request, its result, and the first difference between two results of it.

What may live here: the request and its results, as plain data. What may not: when it is run and what happens after a
wrong result (`known_answer_check.py`).
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from typing import Final

from holdfast.worker.request import EngineRequest, Priority, TokenDelta, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams

NUM_PROMPT_TOKENS: Final = 80
"""Over a block, a row tile and a tile of keys, on every device."""

NUM_OUTPUT_TOKENS: Final = 8

NAME: Final = "self-check"
"""Of the request and of its tenant: it is charged to no other tenant."""

_DIGEST_BYTES: Final = 4


def make_question(vocab_size: int, max_sequence_len: int) -> EngineRequest:
    """The question for a model of so many tokens, cut to what fits a sequence; to be asked under ids and salts of its
    own.

    The output is drawn with noise. Beside each token of output and prompt stands the best one, so greedy choice is
    asked for as well, and log-probabilities are functions of all the logits.
    """
    num_prompt_tokens = max(1, min(NUM_PROMPT_TOKENS, max_sequence_len - NUM_OUTPUT_TOKENS))
    return EngineRequest(
        request_id=NAME,
        prompt_token_ids=tuple(_random_number(index) % vocab_size for index in range(num_prompt_tokens)),
        sampling_params=SamplingParams(
            temperature=1.0, seed=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1
        ),
        priority=Priority.LOW,
        tenant=NAME,
    )


@dataclass(slots=True)
class KnownAnswer:
    """The output so far: tokens and log-probabilities."""

    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """From the second token on."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> None:
        self.prompt_logprobs += delta.prompt_logprobs
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    @property
    def digest(self) -> bytes:
        """Equal answers have equal digests, on every machine; others hardly ever."""
        digest = blake2b(struct.pack(f"<{len(self.token_ids)}q", *self.token_ids), digest_size=_DIGEST_BYTES)
        for packed in (*_packed(self.prompt_logprobs), *_packed(self.logprobs)):
            digest.update(packed)
        return digest.digest()

    def difference(self, right: "KnownAnswer") -> str:
        """The first place where this answer is not the right one, in words; empty if it is right."""
        parts = (
            ("prompt token", self.prompt_logprobs, right.prompt_logprobs),
            ("output token", self.token_ids, right.token_ids),
            ("log-probability of output token", self.logprobs, right.logprobs),
        )
        for name, found, expected in parts:
            for index, (one, other) in enumerate(zip_longest(found, expected)):
                if one != other:
                    return f"{name} {index}: {one}, not {other}"
        return ""


def _packed(items: Iterable[TokenLogprob]) -> Iterator[bytes]:
    for item in items:
        yield struct.pack("<qdq", item.token_id, item.logprob, item.rank)
        yield from (struct.pack("<qd", *best) for best in item.top)


def _random_number(index: int) -> int:
    """The same on every machine and for ever."""
    return int.from_bytes(blake2b(index.to_bytes(8, "little"), digest_size=8).digest(), "little")
