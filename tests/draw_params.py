"""Draws of tests: by the names of sampling parameters, without a request."""

from dataclasses import replace
from typing import Any

from holdfast.worker.draws import DrawParams
from holdfast.worker.sampling_params import SamplingParams

OWN = ("first_output_index", "logits_settings", "output_token_ids")


def draw_params(*, first_output_index: int, **wishes: Any) -> DrawParams:
    """`num_logprobs` is `logprobs`; the other names are those of the parameters and of the draw."""
    return changed(DrawParams(SamplingParams(seed=0), first_output_index), **wishes)


def changed(params: DrawParams, **wishes: Any) -> DrawParams:
    """The same draw but for these."""
    own = {name: wishes.pop(name) for name in OWN if name in wishes}
    if "num_logprobs" in wishes:
        wishes["logprobs"] = wishes.pop("num_logprobs")
    return replace(params, sampling=params.sampling.with_changes(**wishes), **own)
