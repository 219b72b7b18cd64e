"""Logits settings: a request's bans, biases and penalties, resolved to token ids once for a sequence.

What may not live here: state, and tensors (`worker/sampling/logits_processors.py`). The effect of a logits processor is
a function of these settings and the tokens so far, so it is the same whether a sequence runs through, is replayed,
continues on another replica or is drafted.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.worker.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsSettings:
    """The settings of one request. Token ids are 64-bit arrays where they may be many, so that a step need not convert
    them; ids that the model does not have are no error, and do nothing.
    """

    allowed_token_ids: "array[int] | None" = None
    """None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids whose last one is banned where the output ends in the others."""
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    """Banned while there are fewer than `min_tokens` outputs."""
    grammar: str = ""
    """What the output must match, as llguidance writes it; empty: anything."""
    avoided_token_ids: tuple[int, ...] = ()
    """Banned while anything else is left: ends of sequence of an output with a grammar that is to ignore them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    biased_token_ids: "array[int]" = field(init=False, repr=False, compare=False)
    """Of `logit_bias`."""
    biases: "array[float]" = field(init=False, repr=False, compare=False)
    """Of `logit_bias`, in float32."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    """The distinct tokens of the prompt, where the repetition penalty asks for them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "biased_token_ids", _array(token_id for token_id, _ in self.logit_bias))
        object.__setattr__(self, "biases", array("f", [bias for _, bias in self.logit_bias]))

    @classmethod
    def of(cls, request: EngineRequest, eos_token_ids: frozenset[int]) -> "LogitsSettings | None":
        """The settings of a request; None, at no cost later, for one that uses none."""
        params = request.sampling_params
        repeats = params.repetition_penalty != 1
        penalizes = repeats or params.frequency_penalty != 0 or params.presence_penalty != 0
        bans = request.bad_word_token_ids or params.min_tokens or params.allowed_token_ids is not None
        if not (penalizes or bans or request.grammar or params.logit_bias):
            return None
        return cls(
            allowed_token_ids=None if params.allowed_token_ids is None else _array(params.allowed_token_ids),
            bad_words=request.bad_word_token_ids,
            min_tokens=params.min_tokens,
            # Every end of sequence, also if it would not end this one: `ignore_eos` is no wish to see it early.
            end_token_ids=tuple(sorted(eos_token_ids.union(params.stop_token_ids))) if params.min_tokens else (),
            grammar=request.grammar,
            avoided_token_ids=tuple(sorted(eos_token_ids)) if params.ignore_eos and request.grammar else (),
            logit_bias=tuple(params.logit_bias.items()),
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            prompt_token_ids=_array(sorted(set(request.prompt_token_ids)) if repeats else ()),
        )

    @property
    def penalize(self) -> bool:
        """Some penalty is not neutral."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def look_back(self) -> bool:
        """They depend on which tokens the output has, not only on how many."""
        return self.penalize or bool(self.bad_words) or bool(self.grammar)

    def apply_after(self, num_output_tokens: int) -> bool:
        """Whether they can change any draw from here on."""
        lasting = self.look_back or bool(self.logit_bias) or self.allowed_token_ids is not None
        return lasting or num_output_tokens < self.min_tokens


def _array(token_ids: Iterable[int]) -> "array[int]":
    return array("q", token_ids)
