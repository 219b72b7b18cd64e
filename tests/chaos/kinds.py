"""The kinds of requests that must survive every fault, and all that their clients are told of an answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, bundled_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.text.chat import render_chat
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import FinishReason, Priority, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "likes": {"enum": ["tea", "coffee"]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A request as a client makes it."""

    name: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    options: Mapping[str, Any]
    """Of the client's call, besides prompt and parameters."""

    @property
    def is_whole(self) -> bool:
        """Nothing is told before everything is known."""
        return self.params.best_of is not None or self.params.beam_width is not None

    @property
    def may_meet_itself(self) -> bool:
        """Several clients may ask for it at once: with one id for all, each would take the place of the one before."""
        return "request_id" not in self.options

    def longer(self, max_tokens: int) -> "Kind":
        """The same request with more to say, where its kind does not end it before."""
        return replace(self, params=params_of(self.name, max_tokens))


SAMPLED: Final = {"temperature": 0.9, "ignore_eos": True}

_KINDS: Final[Mapping[str, tuple[str | Sequence[Mapping[str, str]], Mapping[str, Any]]]] = MappingProxyType(
    {
        "greedy": ("The capital of France is", {"temperature": 0.0, "ignore_eos": True}),
        "seeded": ("Once upon a time", {"temperature": 0.9, "top_k": 40, "seed": 7, "ignore_eos": True}),
        "JSON schema": ("A person:", {"seed": 11, "structured_outputs": {"json": PERSON}, "max_tokens": 64}),
        "stop strings": (
            "Monday, Tuesday,",
            {"temperature": 0.9, "seed": 5, "stop": ["15 + 8", "15 +"], "max_tokens": 60, "ignore_eos": True},
        ),
        "n=2": ("Three plus four is", {"n": 2, "temperature": 0.8, "seed": 3, "ignore_eos": True}),
        "logprobs": (
            "What is the currency of Japan?",
            {"temperature": 0.7, "seed": 2, "logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True},
        ),
        "penalties": (
            "The weather is",
            {
                "temperature": 0.9,
                "seed": 13,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.1,
                "min_tokens": 20,
                "bad_words": ["the"],
                "logit_bias": {5: 1.0},
            },
        ),
        "speculation": ("Monday Tuesday Wednesday Monday Tuesday", {"temperature": 0.0, "ignore_eos": True}),
        "unseeded": ("A long time ago", SAMPLED),
        "min_tokens": ("Two plus two is", {"temperature": 0.0, "min_tokens": 18, "stop": ["."]}),
        "priority and deadline": ("The sky is", {**SAMPLED, "seed": 17}),
        "chat": ([{"role": "user", "content": "What is the capital of Italy?"}], {**SAMPLED, "seed": 19}),
        "echo": (
            "The days of the week are Monday, Tuesday and",
            {**SAMPLED, "seed": 23, "echo": True, "truncate_prompt_tokens": 6},
        ),
        "best_of": ("My favourite colour is", {**SAMPLED, "seed": 29, "n": 2, "best_of": 4, "logprobs": 1}),
        "beam search": ("The largest animal is", {"n": 2, "beam_width": 3, "ignore_eos": True}),
    }
)

_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "unseeded": {"request_id": "drawn-by-its-id"},
        "priority and deadline": {"priority": Priority.HIGH, "timeout_s": 90.0, "tenant": "a", "cache_salt": "b"},
    }
)


def params_of(name: str, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, **_KINDS[name][1]})


def _prompt(given: str | Sequence[Mapping[str, str]]) -> str | tuple[int, ...]:
    """Messages are rendered by the bundled model's template, as whoever has its tokenizer does."""
    if isinstance(given, str):
        return given
    tokenizer = Tokenizer.load(str(bundled_path(BUNDLED)))
    text = render_chat(tokenizer.chat_template, given, special_tokens=tokenizer.special_tokens)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


KINDS: Final = tuple(
    Kind(name=name, prompt=_prompt(given), params=params_of(name), options=_OPTIONS.get(name, {}))
    for name, (given, _) in _KINDS.items()
)


@dataclass
class Completion:
    """One completion as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cumulative_logprob: float | None = None
    """Told of a whole answer alone."""


UNCOMPARED: Final = ("sequences", "num_doubled", "arrivals_s", "num_attempts")
"""Fields of an answer that may differ, and the one that is compared by its parts."""


@dataclass
class Answer:
    """All that one client was told. Two are equal if it was told the same; when it was told does not count."""

    sequences: dict[int, Completion] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens. How many of the prompt's were cached differs from run to run."""
    error: HoldfastError | None = None
    num_doubled: int = field(default=0, compare=False)
    """Tokens that came with an index that had come before."""
    arrivals_s: list[float] = field(default_factory=list, compare=False)
    """When each chunk came, by the monotonic clock."""
    num_attempts: int = field(default=0, compare=False)
    """Replicas that it ran on, one after the other; 0: not told."""

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences.values())

    @property
    def is_over(self) -> bool:
        return self.usage is not None or self.error is not None

    @property
    def is_whole(self) -> bool:
        return self.usage is not None and all(sequence.finish_reason for sequence in self.sequences.values())

    def difference(self, right: "Answer") -> str:
        """Where this answer and the right one part; empty if they do not."""
        message, wanted = vars(self) | _by_sequence(self), vars(right) | _by_sequence(right)
        compared = [name for name in message if name not in UNCOMPARED]
        return "; ".join(
            f"{name}: {message[name]}, not {wanted.get(name)}" for name in compared if message[name] != wanted.get(name)
        )

    def take(self, chunk: OutputDelta) -> None:
        self.arrivals_s.append(time.monotonic())
        sequence = self.sequences.setdefault(chunk.sequence_index, Completion())
        self.num_doubled += max(0, len(sequence.token_ids) - chunk.first_token_index)
        sequence.token_ids += chunk.token_ids
        sequence.text += chunk.text
        sequence.logprobs += chunk.logprobs
        sequence.finish_reason = chunk.finish_reason or sequence.finish_reason
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        if chunk.usage is not None:
            self._take_usage(chunk.usage)

    def take_all(self, whole: Generation) -> None:
        """An answer that comes in one piece."""
        self.arrivals_s.append(time.monotonic())
        for one in whole.completions:
            self.sequences[one.sequence_index] = Completion(
                token_ids=list(one.token_ids),
                text=one.text,
                logprobs=list(one.logprobs),
                finish_reason=one.finish_reason,
                cumulative_logprob=one.cumulative_logprob,
            )
        self.prompt_logprobs = whole.prompt_logprobs
        self._take_usage(whole.usage)

    def _take_usage(self, usage: Usage) -> None:
        self.usage = _counts(usage)
        self.num_attempts = 0 if usage.figures is None else usage.figures.num_attempts

    def longest_pause_after(self, moment_s: float) -> float | None:
        """Seconds without a chunk, at most, from a moment to the end; None if it ended, or began, on the other side of
        it. The longest, because the next chunk may have been on its way already.
        """
        later = [arrival_s for arrival_s in self.arrivals_s if arrival_s > moment_s]
        if not later or self.arrivals_s[0] > moment_s:
            return None
        return max(after - before for before, after in pairwise([moment_s, *later]))


def _by_sequence(answer: Answer) -> dict[str, object]:
    return {
        f"{name} of sequence {index}": value
        for index, sequence in answer.sequences.items()
        for name, value in vars(sequence).items()
    }


def _counts(usage: Usage) -> tuple[int, int]:
    assert usage.num_cached_tokens < usage.num_prompt_tokens
    return usage.num_prompt_tokens, usage.num_completion_tokens


async def ask(client: AsyncClient, kind: Kind, on_chunk: Callable[[Answer], object] = lambda answer: None) -> Answer:
    """One request to its end. An error is part of the answer."""
    answer = Answer()
    try:
        if kind.is_whole:
            answer.take_all(await client.generate(kind.prompt, kind.params, **kind.options))
        else:
            async for chunk in client.stream(kind.prompt, kind.params, **kind.options):
                answer.take(chunk)
                on_chunk(answer)
    except HoldfastError as error:
        answer.error = error
    return answer
