"""Whether a request can ever run in a replica of this size.

What may live here: checks against the context and the cache as a whole. What may not: who waits for room (`queues.py`).
"""

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.scheduling.sequence import Sequence


def check_fits(sequence: Sequence, *, num_slots: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` for one that could not run to its end even if it were alone in the cache.

    `num_slots` is for how many tokens the cache has room.
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
