"""Beam search parameters and results of offline callers, in the call shape of vLLM.

What may not live here: the search itself (`router/requests/beam_search.py`), and how it gets its candidates
(`router/requests/beam_answer.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.cluster.offline.outputs import BeamSearchSequence
from holdfast.cluster.offline.rendering import ranked
from holdfast.router.requests.answer import CompletedSequence
from holdfast.router.text.tokenizer import Tokenizer
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
        params = SamplingParams(
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
        )
        return params.with_changes(n=self.beam_width)


def beam_sequence(
    completion: CompletedSequence, prompt_token_ids: Sequence[int], tokenizer: Tokenizer, *, keep_end: bool
) -> BeamSearchSequence:
    """A beam as vLLM shows it: after its prompt, and without its end of sequence unless `keep_end`."""
    output = completion.output
    assert output.finish_reason is not None, "a beam is returned when it has ended"
    assert completion.cumulative_logprob is not None, "a beam is ranked by it"
    is_cut = output.finish_reason is FinishReason.STOP and not keep_end
    shown = output.token_ids[:-1] if is_cut else output.token_ids
    tokens = [*prompt_token_ids, *shown]
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=[ranked(candidates, tokenizer) for candidates in completion.candidates[: len(shown)]],
        cum_logprob=completion.cumulative_logprob,
        text=tokenizer.decode(tokens),
        finish_reason=output.finish_reason,
    )
