"""Checks of a new request: whether it could run to its end here, with everything to itself.

What may not live here: what is wrong with a request anywhere (`worker/request.py`), and whether there is room now
(`scheduler.py`).
"""

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import EngineRequest
from holdfast.worker.scheduling.sequence import Sequence


def check_can_end(request: EngineRequest, eos_token_ids: frozenset[int]) -> None:
    """Raises `InvalidRequestError` for an output with a grammar, of a model that has no token to end it with."""
    if request.grammar and not eos_token_ids:
        limit = "is not possible: the model has no end-of-sequence token to end the output with"
        raise InvalidRequestError("sampling_params.structured_outputs", request.sampling_params.structure, limit)


def check_fits(sequence: Sequence, *, num_slots: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` if a sequence is longer than the context, or than the whole KV cache.

    `num_slots` is the number of tokens that the KV cache holds.
    """
    num_prompt_tokens = sequence.num_prompt_tokens
    max_prompt_tokens = min(max_model_len - 1, num_slots)
    if num_prompt_tokens > max_prompt_tokens:
        limit = f"must be at most {max_prompt_tokens} tokens: the context holds {max_model_len} with the output"
        raise InvalidRequestError(
            "prompt", f"{num_prompt_tokens} tokens", f"{limit}, and the KV cache {num_slots} in all"
        )
    if sequence.max_num_slots > num_slots:
        limit = f"must be at most {num_slots + 1 - num_prompt_tokens} after a prompt of {num_prompt_tokens} tokens"
        max_tokens = sequence.request.sampling_params.max_tokens
        raise InvalidRequestError(
            "sampling_params.max_tokens", max_tokens, f"{limit}: the KV cache holds {num_slots} in all"
        )
