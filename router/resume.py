"""Stream resumption: a request continues after the output that its client already received, from any router.

Routers keep no state for this. The text state is a function of the tokens, so the received tokens are pushed again, and
text that the client does not have yet is sent first.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from holdfast.router.events import FRESH, CaughtUp, Deliver, TextState, Usage
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import GREEDY_TEMPERATURE, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The output of one sequence that the client already has."""

    token_ids: tuple[int, ...] = ()
    text_length: int = 0
    """In characters. The text may lag behind the tokens."""
    finish_reason: FinishReason | None = None
    """Set if the client has the sequence's last chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The output of a request that the client already has."""

    sequences: tuple[Progress, ...] = ()
    """By sequence index; of missing ones the client has nothing."""
    fingerprint: str = ""
    """`ModelInfo.fingerprint` of the replica that the tokens came from; empty if not known."""

    def check(self, request_id: str, params: SamplingParams) -> None:
        """Raises `InvalidRequestError` if this cannot be the beginning of the request's output."""
        if len(self.sequences) > params.n:
            raise InvalidRequestError("resume.sequences", len(self.sequences), f"the request has n = {params.n}")
        if not request_id and params.seed is None and params.temperature >= GREEDY_TEMPERATURE:
            limit = "must be that of the stream that was cut off, as its chunks say it: the seed is derived from it"
            raise InvalidRequestError("request_id", request_id, limit)
        for index, progress in enumerate(self.sequences):
            if params.max_tokens is not None and len(progress.token_ids) > params.max_tokens:
                limit = f"must have at most max_tokens = {params.max_tokens} tokens"
                raise InvalidRequestError(f"resume.sequences[{index}].token_ids", len(progress.token_ids), limit)

    def progress(self, index: int) -> Progress:
        return self.sequences[index] if index < len(self.sequences) else Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """One sequence of a request, ready to open: its engine request, and its text state up to what the client has."""

    request: EngineRequest
    text: TextState
    caught_up: CaughtUp = FRESH


def new_sequence(
    sibling: EngineRequest, text: TextState, resume: Resume | None, index: int, echo_length: int = 0
) -> NewSequence:
    """Sequence `index` of a request; `text` must be a new state. Raises what `catch_up` raises."""
    if resume is None:
        return NewSequence(request=sibling, text=text)
    caught_up = catch_up(text, resume, index, echo_length)
    continued = replace(sibling, output_token_ids=resume.progress(index).token_ids)
    return NewSequence(request=continued, text=text, caught_up=caught_up)


def catch_up(text: TextState, resume: Resume, index: int, echo_length: int = 0) -> CaughtUp:
    """Pushes the received tokens of one sequence into its new text state.

    The first `echo_length` characters of the client's text are the prompt's, which come with the first token. Raises
    `InvalidRequestError` if the tokens and the text length do not fit each other.
    """
    progress, name = resume.progress(index), f"resume.sequences[{index}]"
    if progress.finish_reason is not None:
        return CaughtUp(fingerprint=resume.fingerprint, finish_reason=progress.finish_reason)
    piece = text.push(progress.token_ids)
    if piece.num_tokens < len(progress.token_ids):
        limit = f"must be at most {piece.num_tokens} tokens: a stop string is complete there"
        raise InvalidRequestError(f"{name}.token_ids", len(progress.token_ids), limit)
    least, most = (echo_length, echo_length + len(piece.text)) if progress.token_ids else (0, 0)
    if not least <= progress.text_length <= most:
        limit = f"must be in [{least}, {most}]: so much text is certain after {piece.num_tokens} tokens"
        raise InvalidRequestError(f"{name}.text_length", progress.text_length, limit)
    num_sent = progress.text_length - least
    return CaughtUp(
        sent_text=piece.text[:num_sent],
        unsent_text=piece.text[num_sent:],
        fingerprint=resume.fingerprint,
        finish_reason=FinishReason.STOP if piece.stopped else None,
    )


def check_ends(field: str, token_ids: Sequence[int], request: EngineRequest, eos_token_ids: Collection[int]) -> None:
    """Raises `InvalidRequestError` for an output that continues after a token that ends it."""
    params = request.sampling_params
    goes_on = params.ignore_eos and not request.grammar
    ends = {*params.stop_token_ids, *(() if goes_on else eos_token_ids)}
    for index, token_id in enumerate(token_ids[:-1]):
        if token_id in ends:
            raise InvalidRequestError(field, token_id, f"must end with token {index}, which ends the output")


def received_delivery(sequence: NewSequence, index: int, resume: Resume, echo: str = "") -> Deliver | None:
    """All that the client has of a sequence, as one delivery; None if it has nothing of it."""
    progress = resume.progress(index)
    if not progress.token_ids and progress.finish_reason is None:
        return None
    return Deliver(
        request_id=sequence.request.request_id,
        first_token_index=0,
        token_ids=progress.token_ids,
        text=echo + sequence.caught_up.sent_text,
        finish_reason=progress.finish_reason,
        sequence_index=index,
        fingerprint=resume.fingerprint,
    )


def final_delivery(request: EngineRequest, caught_up: CaughtUp) -> Deliver:
    """The last delivery of a resumed sequence that was already complete."""
    num_tokens = len(request.output_token_ids)
    return Deliver(
        request_id=request.request_id,
        first_token_index=num_tokens,
        token_ids=(),
        text=caught_up.unsent_text,
        finish_reason=caught_up.finish_reason,
        usage=Usage(num_prompt_tokens=len(request.prompt_token_ids), num_completion_tokens=num_tokens),
        fingerprint=caught_up.fingerprint,
    )


HOLD: Final = "x-holdfast-hold"
"""Of a request: the number of the submission, from 1. Of a response to it: which stream it is, as `Identity` writes."""

RESUME: Final = "x-holdfast-resume"
"""Of a request: how many bytes at the end of its body are what its client has noted, and not the body's own."""

REPLICAS: Final = "x-holdfast-replicas"
"""Of a request that holds: `1` asks marks to say which replica has made what they stand for."""

MARK: Final = b": held "


@dataclass(frozen=True, slots=True)
class Identity:
    """What all answers to one request have in common, whichever router gives them."""

    request_id: str
    created: int
    """Seconds since 1970: what its chunks say, and what a chat template takes for the time."""

    @property
    def text(self) -> str:
        """For a header."""
        return f"{self.request_id} {self.created}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """None for what no Holdfast router has written."""
        request_id, _, created = text.rpartition(" ")
        return cls(request_id, int(created)) if request_id and created.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the events before it stand for."""

    choice: int
    token_ids: tuple[int, ...]
    num_chars: int
    finish_reason: FinishReason | None = None
    fingerprint: str = ""
    num_events: int = 0
    """Where events are numbered: all of the stream so far."""
    is_last: bool = False
    """The stream is complete."""
    replica_id: str = ""
    """Where it was asked for."""

    @property
    def line(self) -> bytes:
        """The comment, as an event of its own."""
        said: dict[str, Any] = {"s": self.choice, "t": self.token_ids, "c": self.num_chars, "p": self.fingerprint}
        if self.finish_reason is not None:
            said["f"] = str(self.finish_reason)
        if self.num_events:
            said["e"] = self.num_events
        if self.is_last:
            said["end"] = True
        if self.replica_id:
            said["r"] = self.replica_id
        return _line(said)


def failed_line(*, may_retry: bool, retry_after_s: float | None) -> bytes:
    """The mark behind an event that says an error."""
    return _line({"failed": may_retry, "after": retry_after_s})


def _line(said: Mapping[str, Any]) -> bytes:
    return MARK + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class NotedSequence:
    """What a client has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    finish_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Noted:
    """What a client has of a stream, and the age of its request."""

    identity: Identity
    sequences: dict[int, NotedSequence] = field(default_factory=dict)
    """By choice: those of which it has anything."""
    fingerprint: str = ""
    num_events: int = 0
    is_over: bool = False
    age_s: float = 0.0

    def note(self, said: Mapping[str, Any]) -> None:
        """Takes a mark, as its JSON reads. Raises `ValueError` for what is none."""
        try:
            sequence = self.sequences.setdefault(said["s"], NotedSequence())
            sequence.token_ids += said["t"]
            sequence.num_chars += said["c"]
            sequence.finish_reason = said.get("f", sequence.finish_reason)
            self.fingerprint = said["p"]
            self.num_events = said.get("e", 0)
            self.is_over = said.get("end", False)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a stream has a mark that no router writes: {error!r}") from None

    @property
    def content(self) -> bytes:
        """For a router that is to go on with the stream."""
        sequences = {
            index: {"t": one.token_ids, "c": one.num_chars, "f": one.finish_reason}
            for index, one in self.sequences.items()
        }
        said = {
            "id": self.identity.text,
            "p": self.fingerprint,
            "e": self.num_events,
            "age": round(self.age_s, 3),
            "sequences": sequences,
        }
        return json.dumps(said, separators=(",", ":")).encode()

    def resume(self, first: int, count: int) -> Resume:
        """For the request whose choices are the `count` from `first` on."""
        have = [index - first for index in self.sequences if first <= index < first + count]
        sequences = tuple(self._progress(first + index) for index in range(max(have, default=-1) + 1))
        return Resume(sequences=sequences, fingerprint=self.fingerprint)

    def _progress(self, choice: int) -> Progress:
        one = self.sequences.get(choice, NotedSequence())
        reason = None if one.finish_reason is None else FinishReason(one.finish_reason)
        return Progress(token_ids=tuple(one.token_ids), text_length=one.num_chars, finish_reason=reason)
