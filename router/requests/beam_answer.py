"""Response of a beam search request: runs a `BeamSearch` whose candidates come from ordinary one-token requests.

What may live here: those requests, and the completions made of the beams. What may not: the search (`beam_search.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

from holdfast.router.dispatch.call import Call, open_call
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.timeline import Timeline
from holdfast.router.events import CaughtUp, Deliver, Usage
from holdfast.router.requests.answer import CompletedRequest, CompletedSequence, OutputSignal, SampledAnswer
from holdfast.router.requests.beam_search import Beam, BeamSearch, extension
from holdfast.router.resume import NewSequence
from holdfast.router.text.stop_reason import shown_tokens, stop_reason
from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams

_AS_IT_IS: Final = SamplingParams()


class BeamAnswer:
    """One beam search on a router. `whole` opens its requests step by step and leaves none open."""

    def __init__(
        self,
        request: EngineRequest,
        search: BeamSearch,
        dispatch_host: DispatchHost,
        *,
        model: str,
        tokenizer: Tokenizer,
        deadline: float,
        echo: str = "",
        client_attempt: int = 0,
        watch: Callable[[Deliver], None] | None = None,
    ) -> None:
        """`client_attempt` is above 0 if the client submits again when told to. `watch` is told of every delivery of
        the requests for candidates, and last of the completions.
        """
        self.request_id = request.request_id
        self.model = model
        self.prompt_token_ids = request.prompt_token_ids
        """The tokens of the prompt that truncation has left."""
        self.params = request.sampling_params
        self._request = request
        self._search = search
        self._dispatch_host = dispatch_host
        self._tokenizer = tokenizer
        self._deadline = deadline
        self.echo = echo
        self._client_attempt = client_attempt
        self._watch = watch
        self._num_extensions = 0
        self._is_over = False
        self.timelines: list[Timeline] = []
        """Of the first request for candidates, which computes the prompt."""
        self._call: Call | None = None
        self._is_aborted = False
        self._num_cached_tokens = 0
        self._fingerprints: list[str] = []
        """Of all replicas that gave candidates, in that order, each once."""

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all beams, whether they were kept or not."""
        return self._num_extensions

    async def whole(self) -> CompletedRequest:
        """The best beams, best first. Raises what ended one of the requests with an error."""
        while self._search.live and not self._is_aborted:
            outputs = await self._extend(self._search.live)
            if not any(output.finish_reason is FinishReason.ABORT for output in outputs):
                self._search.advance([output.logprobs[0].top for output in outputs])
        n = self._request.sampling_params.n
        beams = self._search.best_so_far(n) if self._search.live else self._search.best(n)
        completions = tuple(self._completion(index, beam) for index, beam in enumerate(beams))
        self._is_over = True
        if self._watch is not None and completions:
            self._watch(completions[0].output)
        return CompletedRequest(
            request_id=self.request_id, model=self.model, completions=completions, usage=self._usage()
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

    async def _extend(self, beams: Sequence[Beam]) -> list[Deliver]:
        """Generates one token after each beam, in one call."""
        sequences, has_output = [self._extension(beam) for beam in beams], OutputSignal()
        self._call = call = open_call(
            self._dispatch_host,
            self.request_id,
            sequences,
            model=self.model,
            deadline=self._deadline,
            on_output=has_output.set,
            client_attempt=self._client_attempt,
            watch=self._watch,
            goes_on=self._call is not None,
        )
        self.timelines = self.timelines or [stream.timeline for stream in call.streams]
        with closing(call):
            outputs = await SampledAnswer(call, has_output, self.model, _AS_IT_IS).outputs()
        seen = dict.fromkeys([*self._fingerprints, *(output.fingerprint for output in outputs)])
        self._fingerprints = list(seen)
        if not beams[0].token_ids:
            self._num_cached_tokens = call.usage.num_cached_tokens
        return outputs

    def _extension(self, beam: Beam) -> NewSequence:
        request = extension(self._request, beam, self._num_extensions, self._search.num_candidates)
        self._num_extensions += 1
        text = TextStream(self._tokenizer, _AS_IT_IS)
        if not self._fingerprints:
            return NewSequence(request=request, text=text)
        caught_up = CaughtUp(fingerprint=self._fingerprints[-1])  # which binds it to the version of what it extends
        return NewSequence(request=request, text=text, caught_up=caught_up)

    def _completion(self, index: int, beam: Beam) -> CompletedSequence:
        params = self._request.sampling_params
        text = TextStream(self._tokenizer, params, self._request.prompt_token_ids)
        finish_reason = self._finish_reason(beam)
        shown = shown_tokens(beam.token_ids, finish_reason, params)
        output = Deliver(
            request_id=self.request_id,
            sequence_index=index,
            first_token_index=0,
            token_ids=beam.token_ids,
            text=self.echo + text.push(shown).text + text.finish(),
            finish_reason=finish_reason,
            fingerprint=self._fingerprints[0] if self._fingerprints else "",
            identity_guaranteed=len(self._fingerprints) <= 1,
            num_cached_tokens=self._num_cached_tokens,
        )
        reason = stop_reason(params, output.finish_reason, beam.token_ids, text.matched)
        return CompletedSequence(
            output=output, cumulative_logprob=beam.logprob, stop_reason=reason, candidates=beam.candidates
        )

    def _finish_reason(self, beam: Beam) -> FinishReason:
        if beam.has_ended:
            return FinishReason.STOP
        return FinishReason.ABORT if self._search.live else FinishReason.LENGTH

    def _usage(self) -> Usage:
        """Every generated token counts, whether its beam was kept or not."""
        return Usage(
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_completion_tokens=self._num_extensions,
            num_cached_tokens=self._num_cached_tokens,
        )
