"""Beam search on the in-process engine: many prompts in step with each other, by requests of one token each.

What may live here: asking the engine for candidates. What may not: the search itself
(`router/requests/beam_search.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Unpack

from holdfast.cluster.offline.inference_engine import InferenceEngine, Prompt, RequestHandle
from holdfast.cluster.offline.outputs import BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from holdfast.cluster.service_options import ServiceOptions
from holdfast.router.requests.beam_search import Beam, BeamSearch
from holdfast.router.text.prompt import echoed_text
from holdfast.router.text.text_stream import TextStream
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import is_flag, is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search. The call shape follows vLLM's class of the same name."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Beams are ranked by what the model itself says: only 0 is taken."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Keep the end of sequence as a beam's last token."""

    def sampling_params(self) -> SamplingParams:
        """The search as a request, for all beams that there are. Raises `InvalidRequestError`."""
        if not is_flag(self.include_stop_str_in_output):
            limit = "must be True or False"
            raise InvalidRequestError("include_stop_str_in_output", self.include_stop_str_in_output, limit)
        if not is_number(self.temperature) or self.temperature != 0:
            raise InvalidRequestError("temperature", self.temperature, "must be 0: a beam search draws nothing")
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBeam:
    """One beam, with the candidates at each of its places."""

    prompt_token_ids: tuple[int, ...]
    beam: Beam
    logprobs: list[dict[int, Logprob]]

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.STOP if self.beam.has_ended else FinishReason.LENGTH

    def sequence(self, engine: InferenceEngine, keep_end: bool) -> BeamSearchSequence:
        """As vLLM shows it: without its end of sequence, unless that is asked for."""
        token_ids = self.beam.token_ids
        shown = token_ids[:-1] if self.beam.has_ended and not keep_end else token_ids
        tokens = [*self.prompt_token_ids, *shown]
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=self.logprobs[: len(shown)],
            cum_logprob=self.beam.logprob,
            text=engine.tokenizer.decode(tokens),
            finish_reason=self.finish_reason,
        )


def search(
    engine: InferenceEngine, prompt: Prompt, params: SamplingParams, **service: Unpack[ServiceOptions]
) -> RequestOutput:
    """The `params.n` best beams of one prompt as its completions, best first. Raises `HoldfastError`.

    A `timeout_s` holds for each token.
    """
    kept = engine.prompt_token_ids(prompt, params)
    given = prompt if isinstance(prompt, str) else tuple(prompt)
    echo = echoed_text(engine.tokenizer, given, kept, params) if params.echo else ""
    (beams,) = find_beams(engine, [kept], params, **service)
    return RequestOutput(
        request_id="",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(kept),
        outputs=[_completion(engine, index, found, params, echo) for index, found in enumerate(beams)],
        finished=True,
    )


def _completion(
    engine: InferenceEngine, index: int, found: FoundBeam, params: SamplingParams, echo: str
) -> CompletionOutput:
    token_ids = found.beam.token_ids
    stream = TextStream(engine.tokenizer, params, found.prompt_token_ids)
    return CompletionOutput(
        index=index,
        text=echo + stream.push(token_ids).text + stream.finish(),
        token_ids=list(token_ids),
        finish_reason=found.finish_reason,
        cumulative_logprob=found.beam.logprob,
    )


def find_beams(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    **service: Unpack[ServiceOptions],
) -> list[list[FoundBeam]]:
    """The `params.n` best beams of each prompt, best first. Raises `HoldfastError`; nothing is left running then."""
    assert params.beam_width is not None, "a request without beams is no search"
    at_once = max(1, engine.max_num_waiting // params.beam_width)
    found: list[list[FoundBeam]] = []
    for start in range(0, len(prompts), at_once):
        searches = [_Search(engine, tuple(prompt), params) for prompt in prompts[start : start + at_once]]
        while pending := [search for search in searches if search.prefixes]:
            _step(engine, pending, service)
        found += [search.best(params.n) for search in searches]
    return found


def _step(engine: InferenceEngine, searches: "Sequence[_Search]", service: ServiceOptions) -> None:
    """One token more for all live beams of all searches, asked for together."""
    handles: list[RequestHandle] = []
    try:
        for search in searches:
            handles += [engine.submit_request(prefix, search.one_token, **service) for prefix in search.prefixes]
        outputs = iter([handle.result().outputs[0] for handle in handles])
    finally:
        for handle in handles:
            if not handle.future.done():
                handle.cancel()
    for search in searches:
        search.advance([(output.logprobs or [{}])[0] for output in islice(outputs, len(search.prefixes))])


class _Search:
    """The search of one prompt, and what was said at each of its prefixes."""

    def __init__(self, engine: InferenceEngine, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self._prompt = prompt
        self._search = BeamSearch.of(params, len(prompt), engine.max_sequence_len, engine.info.eos_token_ids)
        self._said: dict[tuple[int, ...], dict[int, Logprob]] = {}
        self.one_token = SamplingParams(temperature=0.0, max_tokens=1, logprobs=self._search.num_candidates, seed=0)

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """The prompts to ask for one more token; none if the search is over."""
        return [self._prompt + beam.token_ids for beam in self._search.live]

    def advance(self, said: Sequence[dict[int, Logprob]]) -> None:
        """Takes the candidates after each prefix."""
        self._said |= {beam.token_ids: item for beam, item in zip(self._search.live, said, strict=True)}
        self._search.advance([[(token_id, one.logprob) for token_id, one in item.items()] for item in said])

    def best(self, n: int) -> list[FoundBeam]:
        return [
            FoundBeam(
                prompt_token_ids=self._prompt,
                beam=beam,
                logprobs=[self._said[beam.token_ids[:length]] for length in range(len(beam.token_ids))],
            )
            for beam in self._search.best(n)
        ]
