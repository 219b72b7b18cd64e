"""Beam search: takes the candidates of each step and gives the beams to extend next, until the best are known.

A pure core; the requests for candidates are made in `beam_search.py`. The method is that of Hugging Face's `generate`
with `early_stopping=False`:

- of all continuations of the live beams, the 2 * width likeliest are candidates; of equal ones those of the better
  beam, then the lower token id come first;
- a candidate that ends its sequence is finished if it is among the first `width`; the best others live on;
- a finished beam's score is its log-probability over its length, the end included, to the power of the length penalty;
- the search is over when no live beam, at the length it has, scores higher than the worst of `width` finished ones.
"""

import math
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.timeline import Timeline
from holdfast.router.events import FRESH, CaughtUp
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.request_stats import AdmittedRequest
from holdfast.router.text.text_stream import TextStream, shown_tokens, stop_reason
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams

Continuations = Sequence[tuple[int, float]]
"""(token id, logprob) of the likeliest tokens at one position, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One candidate output and its log-probability."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """The sum over the tokens."""
    has_ended: bool = False
    """The last token is an end of sequence."""
    before: "tuple[Beam, Continuations] | None" = field(default=None, compare=False, repr=False)
    """The beam that it extends, and that one's continuations, shared by all its extensions. None: no tokens yet."""

    @property
    def candidates(self) -> list[Continuations]:
        """Continuations that each token was chosen from."""
        found, beam = [], self
        while beam.before is not None:
            beam, continuations = beam.before
            found.append(continuations)
        return found[::-1]

    def score(self, length_penalty: float) -> float:
        """Rank of a finished beam: higher is better."""
        return self.logprob / math.pow(len(self.token_ids), length_penalty)

    def extended(
        self, token_id: int, logprob: float, end_token_ids: Collection[int], continuations: Continuations
    ) -> "Beam":
        """This beam with one more token, which is one of `continuations`."""
        return Beam(
            token_ids=(*self.token_ids, token_id),
            logprob=self.logprob + logprob,
            has_ended=token_id in end_token_ids,
            before=(self, continuations),
        )


class BeamSearch:
    """One search. Pass the candidates of each beam in `live` to `advance`, and repeat until `live` is empty."""

    def __init__(self, *, width: int, length_penalty: float, max_tokens: int, end_token_ids: Collection[int]) -> None:
        self._width = width
        self._length_penalty = length_penalty
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._finished: list[Beam] = []
        self.live: tuple[Beam, ...] = (Beam(),)
        """The beams to extend, likeliest first. Empty: the search is over."""

    @classmethod
    def of(
        cls, params: SamplingParams, num_prompt_tokens: int, max_sequence_len: int, eos_token_ids: Collection[int]
    ) -> "BeamSearch":
        """The search that `params` ask for, of a model that takes `max_sequence_len` tokens of prompt and output."""
        assert params.beam_width is not None, "a request without beams is no search"
        room = max_sequence_len - num_prompt_tokens
        return cls(
            width=params.beam_width,
            length_penalty=params.length_penalty,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            end_token_ids={*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)},
        )

    @property
    def num_candidates(self) -> int:
        """Number of the likeliest continuations that each live beam needs."""
        return 2 * self._width

    def advance(self, continuations: Sequence[Continuations]) -> None:
        """Takes the likeliest (token id, logprob) after each live beam: `num_candidates` of them, or all there are."""
        candidates = self._candidates(continuations)
        is_full_length = len(candidates[0].token_ids) >= self._max_tokens
        over = [beam for beam in candidates[: self._width] if beam.has_ended or is_full_length]
        self._finished = sorted([*self._finished, *over], key=self._badness)[: self._width]
        alive = [] if is_full_length else [beam for beam in candidates if not beam.has_ended][: self._width]
        self.live = tuple(alive) if alive and self._may_improve(alive[0]) else ()

    def best_so_far(self, n: int) -> tuple[Beam, ...]:
        """The `n` best beams, finished or not."""
        return tuple(sorted([*self._finished, *self.live], key=self._badness)[:n])

    def best(self, n: int) -> tuple[Beam, ...]:
        """The `n` best finished beams, best first; fewer if fewer were found."""
        return tuple(self._finished[:n])

    def _candidates(self, continuations: Sequence[Continuations]) -> list[Beam]:
        """The likeliest continuations of all beams, in the order given at the top of the file."""
        found = [
            (beam.logprob + logprob, rank, token_id, beam.extended(token_id, logprob, self._end_token_ids, items))
            for rank, (beam, items) in enumerate(zip(self.live, continuations, strict=True))
            for token_id, logprob in items
        ]
        found.sort(key=lambda item: (-item[0], item[1], item[2]))
        return [beam for *_, beam in found[: self.num_candidates]]

    def _may_improve(self, likeliest: Beam) -> bool:
        if len(self._finished) < self._width:
            return True
        return likeliest.score(self._length_penalty) > self._finished[-1].score(self._length_penalty)

    def _badness(self, beam: Beam) -> float:
        return -beam.score(self._length_penalty)


def extension(request: EngineRequest, beam: Beam, number: int, num_candidates: int) -> EngineRequest:
    """The ordinary request whose one token's `logprobs` are the continuations of a beam of `request`.

    `number` tells the extensions of one search apart. The prefix cache makes it a request for a few tokens.
    """
    return replace(
        request,
        sequence_index=number,
        prompt_token_ids=request.prompt_token_ids + beam.token_ids,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_candidates, seed=0),
    )


_AS_IT_IS: Final = SamplingParams()


class BeamAnswer:
    """One beam search on a router. `whole` opens its requests step by step and leaves none open."""

    def __init__(self, admitted: AdmittedRequest, dispatch_host: DispatchHost, tokenizer: Tokenizer) -> None:
        """The admitted request counts all deltas of the requests for candidates, and the completions last."""
        self.request = request = admitted.request
        self.model = admitted.named_model
        self.echo = admitted.echo
        self._admitted = admitted
        self._search = BeamSearch.of(
            request.sampling_params,
            len(request.prompt_token_ids),
            admitted.facts.max_sequence_len,
            admitted.facts.eos_token_ids,
        )
        self._dispatch_host = dispatch_host
        self._tokenizer = tokenizer
        self._num_extensions = 0
        self._is_over = False
        self.timelines: list[Timeline] = []
        """Timelines of the first request for candidates, which computes the prompt."""
        self._call: SampledAnswer | None = None
        self._is_aborted = False
        self._num_cached_tokens = 0
        self._fingerprints: list[str] = []
        """Fingerprints of all replicas that gave candidates, in that order, each once."""

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all beams, whether they were kept or not."""
        return self._num_extensions

    async def whole(self) -> Generation:
        """The best beams, best first. Raises what ended one of the requests with an error."""
        while self._search.live and not self._is_aborted:
            outputs = await self._extend(self._search.live)
            if not any(output.finish_reason is FinishReason.ABORT for output in outputs):
                self._search.advance([output.logprobs[0].top for output in outputs])
        n = self.request.sampling_params.n
        beams = self._search.best_so_far(n) if self._search.live else self._search.best(n)
        completions = tuple(self._completion(index, beam) for index, beam in enumerate(beams))
        self._is_over = True
        if completions:
            self._admitted.note(completions[0])
        return Generation(
            request_id=self.request.request_id,
            model=self.model,
            completions=completions,
            usage=self._usage(),
            candidates=[beam.candidates for beam in beams],
        )

    @property
    def is_over(self) -> bool:
        """The beams are known."""
        return self._is_over

    def abort(self) -> bool:
        """Ends the search with the best beams so far. Returns whether it went on."""
        was_live, self._is_aborted = bool(self._search.live) and not self._is_aborted, True
        if self._call is not None:
            self._call.abort()
        return was_live

    async def _extend(self, beams: Sequence[Beam]) -> list[OutputDelta]:
        """Generates one token after each beam, in one call."""
        goes_on, self._call = self._call is not None, SampledAnswer(self._admitted)
        call, sequences = self._call, [self._extension(beam) for beam in beams]
        call.open(self._dispatch_host, sequences, call, watch=self._admitted.note, goes_on=goes_on)
        self.timelines = self.timelines or [stream.timeline for stream in call.streams]
        with closing(call):
            outputs = await call.outputs()
        seen = dict.fromkeys([*self._fingerprints, *(output.system_fingerprint for output in outputs)])
        self._fingerprints = list(seen)
        if not beams[0].token_ids:
            self._num_cached_tokens = call.usage.num_cached_tokens
        return outputs

    def _extension(self, beam: Beam) -> RequestState:
        request = extension(self.request, beam, self._num_extensions, self._search.num_candidates)
        self._num_extensions += 1
        # The fingerprint binds it to the version of the extended beam.
        caught_up = CaughtUp(fingerprint=self._fingerprints[-1]) if self._fingerprints else FRESH
        return RequestState(
            request=request,
            model=self.model,
            text=TextStream(self._tokenizer, _AS_IT_IS),
            caught_up=caught_up,
            deadline=self._admitted.deadline,
            client_attempt=self._admitted.client_attempt,
        )

    def _completion(self, index: int, beam: Beam) -> OutputDelta:
        params = self.request.sampling_params
        text = TextStream(self._tokenizer, params, self.request.prompt_token_ids)
        finish_reason = self._finish_reason(beam)
        shown = shown_tokens(beam.token_ids, finish_reason, params)
        stopped = finish_reason is FinishReason.STOP
        return OutputDelta(
            request_id=self.request.request_id,
            sequence_index=index,
            first_token_index=0,
            token_ids=beam.token_ids,
            text=self.echo + text.push(shown).text + text.finish(),
            finish_reason=finish_reason,
            system_fingerprint=self._fingerprints[0] if self._fingerprints else "",
            replayed_without_guarantee=len(self._fingerprints) > 1,
            num_cached_tokens=self._num_cached_tokens,
            stop_reason=stop_reason(params, beam.token_ids, text.matched) if stopped else None,
            cumulative_logprob=beam.logprob,
        )

    def _finish_reason(self, beam: Beam) -> FinishReason:
        if beam.has_ended:
            return FinishReason.STOP
        return FinishReason.ABORT if self._search.live else FinishReason.LENGTH

    def _usage(self) -> Usage:
        """Every generated token counts, whether its beam was kept or not."""
        return Usage(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_completion_tokens=self._num_extensions,
            num_cached_tokens=self._num_cached_tokens,
        )
