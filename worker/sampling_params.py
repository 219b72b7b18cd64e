"""Sampling parameters: how to draw tokens and when to stop, each declared once, with the checks that need no model.

The fields of both wires (`sampling_fields.py`), the command line's flags and the table in `docs/sampling.md` follow
from `PARAMETERS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, InitVar, dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import (
    ALL_LOGPROBS,
    AT_LEAST_ZERO,
    BIASES,
    FIELD,
    MAX_BEAM_WIDTH,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_SEED,
    NOT_BLANK,
    NOT_ZERO,
    STRUCTURE,
    TEXTS,
    TOKEN_IDS,
    Declarations,
    Group,
    Metadata,
    Scope,
    by_token_id,
)
from holdfast.worker.structured_outputs import StructuredOutputs
from holdfast.worker.value_types import (
    SAMPLING_FIELDS,
    OutputKind,
    RequestOutputKind,
    check_neutral,
    set_slot,
    takes_neutral,
)


def _seed(number: int) -> int | None:
    """vLLM's -1 is no seed; of another negative one the remainder is taken."""
    return None if number == -1 else number % (MAX_SEED + 1)


_draw = partial(Metadata, scope=Scope.TOKENS, group=Group.SAMPLING)
_end = partial(Metadata, scope=Scope.TOKENS, group=Group.ENDING)
_report = partial(Metadata, scope=Scope.TEXT, group=Group.REPORT)


@takes_neutral(SAMPLING_FIELDS, f"{FIELD}.")
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SamplingParams(OutputKind):
    """Parameters of sampling and stopping. The call shape follows vLLM's class of the same name.
    Raises `InvalidRequestError`, naming the field, for a value outside its limits, given or set later. Lists are stored
    as tuples. A request takes a copy: later changes apply to the next request.

    Two more are accepted for compatibility with vLLM: `guided_decoding`, the older name of `structured_outputs`, and
    `output_kind`, which `AsyncLLMEngine` and `LLMEngine` apply; elsewhere it has no effect: `generate` returns finished
    outputs, a client's stream returns deltas, and a callback gets the whole output so far. Fields of vLLM's class that
    are not supported are taken with the values that ask for nothing (`SAMPLING_FIELDS`), and refused by name with
    others.
    """

    temperature: Annotated[
        float,
        Field(ge=0, le=100, description="logits are divided by it; 0 (below 1e-5) takes the best token every time"),
        _draw(flag_default=0.0),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(ge=-1, description="keeps the k best tokens, and ties with the last; 0 for all"),
        AT_LEAST_ZERO,
        _draw(draw_type="i", limit="must be at least 1, or 0 for all tokens", limits="0 or more", means_all=True),
    ] = 0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="keeps the smallest set of best tokens with this probability mass"),
        _draw(draw_type="d"),
    ] = 1.0
    min_p: Annotated[
        float,
        Field(ge=0, le=1, description="drops tokens with less than this share of the best one's probability"),
        _draw(draw_type="d"),
    ] = 0.0
    seed: Annotated[
        int | None,
        Field(ge=-MAX_SEED - 1, le=MAX_SEED, description="seed of the draws, modulo 2^63; -1: unset"),
        AfterValidator(_seed),
        _draw(draw_type="q", flag_default=0, neutral="from the request id", limits="-2^63 to 2^63 - 1"),
    ] = None
    repetition_penalty: Annotated[
        float,
        # Far beyond such limits a penalized logit is no longer a finite float.
        Field(
            ge=0.01,
            le=100,
            description="above 1 avoids tokens of prompt and output: divides positive logits, multiplies others",
        ),
        _draw(is_penalty=True, with_beams=False),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Field(ge=-2, le=2, description="subtracted from the logit of each token that the output already contains"),
        _draw(is_penalty=True, with_beams=False),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Field(ge=-2, le=2, description="subtracted from a token's logit once per occurrence in the output"),
        _draw(is_penalty=True, with_beams=False),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        BIASES,
        Field(description="added to the logits of these token ids"),
        _draw(
            with_beams=False,
            limit="token ids must not be negative, and biases be in [-100, 100]",
            limits="-100 to 100, ids below the vocabulary size",
        ),
    ] = field(default_factory=dict, hash=False)
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        TOKEN_IDS,
        Field(min_length=1, description="only these tokens can be drawn"),
        _draw(
            with_beams=False,
            limit="must allow at least one token, and token ids must not be negative",
            limits="not empty, below the vocabulary size",
        ),
    ] = None
    bad_words: Annotated[
        str | Sequence[str],
        TEXTS,
        Field(
            description="banned texts: the last token of a text is banned where the output ends in the tokens before it"
        ),
        NOT_BLANK,
        Metadata(
            scope=Scope.TEXT,
            group=Group.SAMPLING,
            with_beams=False,
            limit="must not be empty or only spaces",
            limits="not blank; 256 words of 256 characters on a server",
        ),
    ] = ()
    structured_outputs: Annotated[
        StructuredOutputs | Mapping[str, object] | None,
        STRUCTURE,
        Field(description="constrains the output to a JSON schema, any JSON object, a regex, a choice or a grammar"),
        Metadata(
            scope=Scope.TEXT,
            group=Group.STRUCTURE,
            with_beams=False,
            limits="one of five kinds; 65,536 characters on a server",
        ),
    ] = None

    max_tokens: Annotated[
        int | None,
        Field(ge=1, description="at most this many output tokens; none: up to the model's context length"),
        _end(means_all=True, flag_default=64, limits="1 or more; `None` in Python"),
    ] = 16
    min_tokens: Annotated[
        int,
        Field(ge=0, description="minimum output tokens: end tokens are banned and stop texts ignored until then"),
        _end(with_beams=False, limits="0 to `max_tokens`"),
    ] = 0
    stop: Annotated[
        str | Sequence[str],
        TEXTS,
        Field(description="text that ends the output"),
        _end(
            scope=Scope.TEXT,
            with_beams=False,
            limit="stop strings must not be empty",
            limits="64 strings of 1024 characters on a server",
        ),
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int],
        TOKEN_IDS,
        Field(description="tokens that end the output, besides the model's own"),
        _end(limit="token ids must not be negative", limits="below the vocabulary size"),
    ] = ()
    ignore_eos: Annotated[
        bool, Field(description="the model's own end-of-sequence tokens do not end the output"), _end()
    ] = False
    include_stop_str_in_output: Annotated[
        bool, Field(description="keeps the stop string as the end of the text"), _end(scope=Scope.TEXT)
    ] = False

    n: Annotated[
        int,
        Field(ge=1, description="completions of the request; number i is drawn with seed + i"),
        _report(short_flag="-n", limits="1 or more; 64 on a server"),
    ] = 1
    best_of: Annotated[
        int | None,
        Field(description="completions to draw, of which the n likeliest are returned"),
        _report(with_beams=False, neutral="n", limits="n or more; 64 on a server"),
    ] = None
    beam_width: Annotated[
        int | None,
        Field(ge=1, le=MAX_BEAM_WIDTH, description="beam search with this many beams instead of sampling"),
        _report(),
    ] = None
    length_penalty: Annotated[
        float,
        Field(
            ge=-10, le=10, description="of a beam search: the power of the length that a log-probability is divided by"
        ),
        _report(),
    ] = 1.0
    logprobs: Annotated[
        int | None,
        Field(
            ge=ALL_LOGPROBS,
            le=MAX_LOGPROBS,
            description="returns each output token's log-probability and rank, and this many top tokens; -1: all",
        ),
        _report(scope=Scope.TOKENS, with_beams=False),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(ge=ALL_LOGPROBS, le=MAX_LOGPROBS, description="returns the same for each prompt token"),
        _report(scope=Scope.TOKENS, with_beams=False),
    ] = None
    logprob_token_ids: Annotated[
        Sequence[int],
        TOKEN_IDS,
        Field(
            max_length=MAX_LOGPROB_TOKEN_IDS,
            description="with `logprobs`: reports these tokens with each output token, in place of the best ones",
        ),
        _report(
            scope=Scope.TOKENS,
            with_beams=False,
            limit=f"must be at most {MAX_LOGPROB_TOKEN_IDS} token ids, none of them negative",
            limits=f"{MAX_LOGPROB_TOKEN_IDS} ids, below the vocabulary size",
        ),
    ] = ()
    echo: Annotated[bool, Field(description="begins the text with the prompt's"), _report()] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(ge=-1, description="keeps the last tokens of the prompt; -1: the number that fits"),
        NOT_ZERO,
        _report(means_all=True, limit="must be at least 1, or -1 for the number that fits", limits="1 or more, or -1"),
    ] = None
    truncate_right: Annotated[
        bool, Field(description="truncate_prompt_tokens keeps the first tokens of the prompt"), _report()
    ] = False
    skip_special_tokens: Annotated[
        bool,
        Field(description="leaves special tokens, such as the end of sequence, out of the text"),
        _report(negative_flag="--keep-special-tokens"),
    ] = True

    detokenize: Annotated[
        bool,
        Field(description="makes text of the tokens; without it the text is empty, and there are no stop strings"),
        _report(negative_flag="--no-text"),
    ] = True

    guided_decoding: InitVar[StructuredOutputs | Mapping[str, object] | None] = None
    output_kind: InitVar[RequestOutputKind] = RequestOutputKind.CUMULATIVE

    def __post_init__(
        self, guided_decoding: StructuredOutputs | Mapping[str, object] | None, output_kind: RequestOutputKind
    ) -> None:
        if guided_decoding is not None:
            if self.structured_outputs is not None:
                raise _refusal("guided_decoding", guided_decoding, "must not be set with structured_outputs")
            self.structured_outputs = guided_decoding  # it is checked below
        for value, (name, parameter) in zip(PARAMETERS.values_of(self), PARAMETERS.items(), strict=True):
            if value is not parameter.default:
                set_slot(self, name, parameter.check(value))
        self._set_other("output_kind", output_kind)
        self._check_together()

    def __setattr__(self, name: str, value: object) -> None:
        """A parameter that is set is checked like one that is passed; a refused value changes nothing."""
        if self._output_kind is None:  # `__init__` gives it, which checks all of them at its end
            return set_slot(self, name, value)
        if name not in PARAMETERS:
            return self._set_other(name, value)
        before = getattr(self, name)
        set_slot(self, name, PARAMETERS[name].check(value))
        try:
            self._check_together()
        except InvalidRequestError:
            set_slot(self, name, before)
            raise

    def _set_other(self, name: str, value: object) -> None:
        if name == "output_kind":
            self._set_output_kind(value)
        elif name == "guided_decoding":
            self.structured_outputs = value  # type: ignore[assignment]  # it is checked
        elif name in SAMPLING_FIELDS:
            check_neutral(name, value, SAMPLING_FIELDS[name], f"{FIELD}.")
        else:
            raise AttributeError(f"SamplingParams has no parameter {name!r}")

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Parameters as vLLM's server makes them: None is the default, and keys of `logit_bias` may be texts."""
        if isinstance(biases := by_token_id(given.get("logit_bias")), Mapping):  # beyond the bounds it takes the bounds
            given["logit_bias"] = {key: min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, one)) for key, one in biases.items()}
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        """Another object with the same values."""
        twin = object.__new__(type(self))
        for name, value in zip(PARAMETERS, PARAMETERS.values_of(self), strict=True):
            set_slot(twin, name, value)
        set_slot(twin, "logit_bias", dict(self.logit_bias))  # the mutable one
        set_slot(twin, "_output_kind", self._output_kind)
        return twin

    def fitted(self, seed: int, max_model_len: int, vocab_size: int) -> Self:
        """With this seed, and `max_tokens` and `top_k` limited to what a model has, so that they fit the engine's
        integers. Raises `InvalidRequestError` for more `min_tokens` than the model has.
        """
        if self.min_tokens > max_model_len:
            limit = f"must be at most {max_model_len}, the model's maximum context length"
            raise _refusal("min_tokens", self.min_tokens, limit)
        changed = self.clone()
        set_slot(changed, "seed", seed)
        set_slot(changed, "top_k", min(self.top_k, vocab_size))
        if self.max_tokens is not None:
            set_slot(changed, "max_tokens", min(self.max_tokens, max_model_len))
        return changed

    def first_tokens(self, number: int) -> Self:
        """For the first tokens of the same outputs, at most this many."""
        least = min(self.min_tokens, number)
        no_logprobs: dict[str, object] = {"logprobs": None, "prompt_logprobs": None, "logprob_token_ids": ()}
        return self.with_changes(max_tokens=number, min_tokens=least, **no_logprobs)

    def with_changes(self, **changes: object) -> Self:
        """A copy with these fields replaced. The other fields are not checked again."""
        if unknown := changes.keys() - PARAMETERS.keys():
            raise TypeError(f"no sampling parameters: {', '.join(unknown)}")
        changed = self.clone()
        for name in filter(changes.__contains__, PARAMETERS):
            set_slot(changed, name, PARAMETERS[name].check(changes[name]))
        changed._check_together()
        return changed

    def _check_together(self) -> None:
        """Checks parameters against each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"must be at most max_tokens, {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise _refusal("stop", self.stop, "must not be set without detokenize: they are found in the text")
        if self.logprob_token_ids and self.logprobs is None:
            raise _refusal("logprob_token_ids", self.logprob_token_ids, "must come with logprobs")
        if self.beam_width is not None:
            self._check_beams(self.beam_width)
        if self.best_of is not None and self.best_of < self.n:
            raise _refusal("best_of", self.best_of, f"must be at least n, {self.n}")

    def _check_beams(self, beam_width: int) -> None:
        """Beams are ranked by the model's log-probabilities: parameters that change or cut these do not apply."""
        if self.n > beam_width:
            raise _refusal("n", self.n, f"must be at most beam_width, {beam_width}")
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            neutral = {} if parameter.default is MISSING else parameter.default
            if not parameter.metadata.with_beams and value != neutral:
                raise _refusal(name, value, "must not be set with beam_width: a beam search does not sample")

    @property
    def num_sequences(self) -> int:
        """Number of completions drawn."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return self.stop  # type: ignore[return-value]  # a tuple since __post_init__

    @property
    def structure(self) -> StructuredOutputs | None:
        """`structured_outputs`, checked."""
        return self.structured_outputs  # type: ignore[return-value]  # since __post_init__


PARAMETERS: Final = Declarations(SamplingParams)


def _refusal(name: str, value: object, limit: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD}.{name}", value, limit)
