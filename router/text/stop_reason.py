"""Stop reason of a sequence: the stop string, or the token among the request's own, that ended it; and which tokens its
text is of.

What may not live here: whether the output ends, and finding stop strings (`text_stream.py`).
"""

from collections.abc import Sequence

from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams


def stop_reason(
    params: SamplingParams, finish_reason: FinishReason | None, token_ids: Sequence[int], matched: str | None
) -> str | int | None:
    """`token_ids` are the last ones of the output, and `matched` is the stop string that its text state has found.

    None where the model's own end or a limit has ended it.
    """
    if finish_reason is not FinishReason.STOP:
        return None
    if matched is not None:
        return matched
    last = token_ids[-1] if token_ids else None
    return last if last in params.stop_token_ids else None


def shown_tokens(
    token_ids: tuple[int, ...], finish_reason: FinishReason | None, params: SamplingParams
) -> tuple[int, ...]:
    """Those of the last tokens of an output that its text is of. `finish_reason` is the engine's: an output that it
    ends with `STOP` has an end of sequence or a stop token as its last token, which is no text.
    """
    is_shown = finish_reason is not FinishReason.STOP or params.include_stop_str_in_output
    return token_ids if is_shown else token_ids[:-1]
