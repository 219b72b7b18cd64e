"""Parallel sampling (`n`, `best_of`): the requests that one request becomes, and the choice of the best.

Pure functions, for the router and for the offline engine.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import MAX_SEED, SamplingParams


def siblings(request: EngineRequest) -> tuple[EngineRequest, ...]:
    """One request for each sequence to sample: the request itself if it is one, else those of one group, by index.

    Each samples with its own seed: number i gives what a single request with seed + i would give. Only the first
    reports the prompt's log-probabilities, which are the same for all.
    """
    count = request.sampling_params.num_sequences
    if count == 1:
        return (request,)
    return tuple(
        replace(
            request,
            sequence_index=index,
            group_id=request.key,
            sampling_params=_params_of(request.sampling_params, index),
        )
        for index in range(count)
    )


def best(logprobs: Sequence[Sequence[float]], n: int) -> list[int]:
    """Indices of the `n` sequences with the highest mean log-probability, best first; of equal ones the lower index.

    `logprobs[i]` are those of sequence i's tokens. A sequence without tokens is the worst.
    """
    means = [math.fsum(values) / len(values) if values else -math.inf for values in logprobs]
    return sorted(range(len(means)), key=lambda index: (-means[index], index))[:n]


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    assert params.seed is not None, "the seed is chosen before there are siblings"
    is_ranked = params.num_sequences > params.n
    return params.with_changes(
        n=1,
        best_of=None,
        seed=(params.seed + index) % (MAX_SEED + 1),
        logprobs=0 if is_ranked and params.logprobs is None else params.logprobs,
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )
