"""Conversion of the router's completions to offline outputs: lists, and log-probabilities by token id with their texts.

Pure functions. What may not live here: who gets an output, and when (`local_request.py`).
"""

from collections.abc import Iterable
from dataclasses import replace

from holdfast.cluster.offline.outputs import CompletionOutput, Logprob
from holdfast.router.requests.answer import CompletedSequence
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling_params import SamplingParams


def completion_output(completion: CompletedSequence, params: SamplingParams, tokenizer: Tokenizer) -> CompletionOutput:
    """One completion, of a request with `params`."""
    output = completion.output
    has_logprobs = params.logprobs is not None
    return CompletionOutput(
        index=output.sequence_index,
        text=output.text,
        token_ids=list(output.token_ids),
        finish_reason=output.finish_reason,
        stop_reason=completion.stop_reason,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=[_output_logprobs(item, params, tokenizer) for item in output.logprobs] if has_logprobs else None,
    )


def prompt_logprobs(
    first: CompletedSequence, params: SamplingParams, tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None] | None:
    """What is said of the prompt, which goes with the first completion. Of its first token no model says anything."""
    if params.prompt_logprobs is None:
        return None
    return [None, *(by_token_id(item, tokenizer) for item in first.output.prompt_logprobs)]


def _output_logprobs(item: TokenLogprob, params: SamplingParams, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The token itself first, then the best ones, or those that are asked for by their ids, without ranks."""
    said = by_token_id(item, tokenizer)
    if not params.logprob_token_ids:
        return said
    return {token_id: one if token_id == item.token_id else replace(one, rank=None) for token_id, one in said.items()}


def by_token_id(item: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The token itself first, then the best ones."""
    own = {item.token_id: _logprob(item.token_id, item.logprob, item.rank, tokenizer)}
    return own | ranked(item.top, tokenizer) | own


def ranked(top: Iterable[tuple[int, float]], tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The best tokens at one place, best first."""
    return {
        token_id: _logprob(token_id, logprob, rank, tokenizer) for rank, (token_id, logprob) in enumerate(top, start=1)
    }


def _logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> Logprob:
    return Logprob(logprob=logprob, rank=rank, decoded_token=tokenizer.tokens.name_of(token_id))
