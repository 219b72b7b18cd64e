"""Draws: all inputs of one token's sampling besides its logits, and the banned tokens.

`DRAW_TYPES` and `PENALTIES` are the fields of the records in which Python, C++ (`native/draw_records.h`) and Triton
(`kernels/`) have them. They follow from the declarations of the parameters.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from struct import calcsize
from typing import Final

from holdfast.worker.parameters import GREEDY_TEMPERATURE
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams

DRAW_PARAMETERS: Final = tuple(
    sorted(
        (name for name, item in PARAMETERS.items() if item.metadata.draw_type),
        key=lambda name: -calcsize(PARAMETERS[name].metadata.draw_type),
    )
)
"""Parameters that a draw's record has as they are."""
DRAW_TYPES: Final[Mapping[str, str]] = {
    **{name: PARAMETERS[name].metadata.draw_type for name in DRAW_PARAMETERS},
    "inverse_temperature": "f",  # 0: the best token
    "position": "i",
    "edits": "i",  # number of the row's edits; -1: none
    "num_logprobs": "i",  # best tokens to report; -1: no log-probabilities at all
    "token": "i",  # not drawn but given, for log-probabilities of a prompt; -1: drawn
}
"""The fields of a draw's record, those of 64 bits first, and their types as letters of `struct`."""
PENALTIES: Final = tuple(name for name, item in PARAMETERS.items() if item.metadata.is_penalty)
"""The penalties of a row, each a float32, in their order."""


def words_of(types: Mapping[str, str]) -> dict[str, int]:
    """First word of each field of a record, in words of 32 bits."""
    sizes = [calcsize(letter) // 4 for letter in types.values()]
    return {name: sum(sizes[:number]) for number, name in enumerate(types)}


_NO_PENALTIES: Final = tuple(PARAMETERS[name].default for name in PENALTIES)
_penalties_of: Final = attrgetter(*PENALTIES)


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
    """Grammar that the output must match, as llguidance writes it; empty: none."""
    avoided_token_ids: tuple[int, ...] = ()
    """Banned while anything else is left: ends of sequence of an output with a grammar that is to ignore them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    biased_token_ids: "array[int]" = field(init=False, repr=False, compare=False)
    """Token ids of `logit_bias`."""
    biases: "array[float]" = field(init=False, repr=False, compare=False)
    """Biases of `logit_bias`, in float32."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    """Distinct tokens of the prompt, for the repetition penalty; else empty."""
    penalties: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Values of `PENALTIES`."""
    penalize: bool = field(init=False, repr=False, compare=False)
    """Some penalty is not neutral."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "penalties", tuple(getattr(self, name) for name in PENALTIES))
        object.__setattr__(self, "penalize", self.penalties != _NO_PENALTIES)
        object.__setattr__(self, "biased_token_ids", _array(token_id for token_id, _ in self.logit_bias))
        object.__setattr__(self, "biases", array("f", [bias for _, bias in self.logit_bias]))

    @classmethod
    def of(cls, request: EngineRequest, eos_token_ids: frozenset[int]) -> "LogitsSettings | None":
        """The settings of a request; None for a request without any, at no further cost."""
        params = request.sampling_params
        repeats = params.repetition_penalty != 1
        penalizes = _penalties_of(params) != _NO_PENALTIES
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
            **{name: getattr(params, name) for name in PENALTIES},
            prompt_token_ids=_array(sorted(set(request.prompt_token_ids)) if repeats else ()),
        )

    @property
    def look_back(self) -> bool:
        """They depend on the output's tokens, not only on their number."""
        return self.penalize or bool(self.bad_words) or bool(self.grammar)

    def apply_after(self, num_output_tokens: int) -> bool:
        """Whether they can change any draw from here on."""
        lasting = self.look_back or bool(self.logit_bias) or self.allowed_token_ids is not None
        return lasting or num_output_tokens < self.min_tokens


def _array(token_ids: Iterable[int]) -> "array[int]":
    return array("q", token_ids)


@dataclass(slots=True)
class DrawParams:
    """All that a draw depends on besides the logits: it is a pure function of both."""

    sampling: SamplingParams
    """Parameters of the request, with a seed."""
    first_output_index: int
    """Output position of the first token drawn: the noise is keyed by (seed, position, token id)."""
    logits_settings: LogitsSettings | None = None
    """None where logits are taken as they are: nearly always."""
    output_token_ids: "tuple[int, ...] | array[int]" = ()
    """Output before the draw, where `logits_settings` look back at it; else empty. An array of 64 bits each is taken
    as it is by what reads thousands of them in each step."""

    @property
    def seed(self) -> int:
        """Seed of the draws. The router has chosen one where the request gave none."""
        assert self.sampling.seed is not None, "the seed is resolved before a request reaches the engine"
        return self.sampling.seed

    @property
    def num_logprobs(self) -> int | None:
        """Best tokens to report with the drawn one's logprob; None: no logprobs. None of the best where tokens are
        asked for by their ids. Does not touch the draw.
        """
        return 0 if self.sampling.logprob_token_ids else self.sampling.logprobs

    def at(self, output_index: int) -> "DrawParams":
        """The same request's draw at another output position, without logits settings."""
        other = _new(DrawParams)  # its own constructor takes twice as long
        other.sampling = self.sampling
        other.first_output_index = output_index
        other.logits_settings = None
        other.output_token_ids = ()
        return other

    @property
    def needs_logits(self) -> bool:
        """Whether the draw needs more than the argmax of its row, or reports more."""
        is_warm = self.sampling.temperature >= GREEDY_TEMPERATURE
        return is_warm or self.logits_settings is not None or self.sampling.logprobs is not None


_new = object.__new__


def draw_after(first: DrawParams, drafts: tuple[int, ...]) -> DrawParams:
    """The draw after these drafted tokens, which it takes for outputs: it counts only if they are right."""
    looks_back = first.logits_settings is not None and first.logits_settings.look_back
    return replace(
        first,
        first_output_index=first.first_output_index + len(drafts),
        output_token_ids=_with(first.output_token_ids, drafts) if looks_back else (),
    )


def _with(outputs: "tuple[int, ...] | array[int]", drafts: tuple[int, ...]) -> "tuple[int, ...] | array[int]":
    return outputs + drafts if isinstance(outputs, tuple) else outputs + array("q", drafts)


def banned_token_ids(params: DrawParams) -> list[int]:
    """Tokens that bad words, the minimum length and ignored ends forbid next, for a draw with logits processors."""
    logits_settings, outputs = params.logits_settings, params.output_token_ids
    assert logits_settings is not None, "only draws with logits processors have bans"
    banned = [
        word[-1] for word in logits_settings.bad_words if tuple(outputs[len(outputs) - len(word) + 1 :]) == word[:-1]
    ]
    if params.first_output_index < logits_settings.min_tokens:
        banned += logits_settings.end_token_ids
    return banned + list(logits_settings.avoided_token_ids)
