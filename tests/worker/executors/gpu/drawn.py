"""Draws of all kinds, with and without logits processors, as tests of any device take them."""

from array import array

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.executors.step_sampler import HeadOutput, Sampled
from tests.draw_params import changed, draw_params

PLAIN = draw_params(seed=7, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0)
FILTERS = {
    "plain": PLAIN,
    "greedy": changed(PLAIN, temperature=0.0),
    "hot": changed(PLAIN, temperature=60.0),
    "top-p": changed(PLAIN, temperature=0.8, top_p=0.95),
    "narrow top-p": changed(PLAIN, temperature=1.7, top_p=0.02),
    "top-k": changed(PLAIN, top_k=20),
    "large top-k": changed(PLAIN, top_k=150, temperature=3.0),
    "min-p": changed(PLAIN, min_p=0.05, temperature=1.3),
    "all": changed(PLAIN, temperature=1.1, top_k=50, top_p=0.9, min_p=0.001),
}


SETTINGS = {
    "allowed": LogitsSettings(allowed_token_ids=array("q", [3, 4, 5, 100_000, -1, 2**40, 64, 65])),
    "unknown allowed": LogitsSettings(allowed_token_ids=array("q", [100_000])),
    "bad words": LogitsSettings(bad_words=((1, 2, 9), (2, 11), (5,))),
    "min tokens": LogitsSettings(min_tokens=50, end_token_ids=(0, 1, 2, 7)),
    "bans of all": LogitsSettings(allowed_token_ids=array("q", [5]), bad_words=((5,),)),
    "bias": LogitsSettings(logit_bias=((4, 9.5), (8, -100.0), (99_999, 3.0))),
    "penalties": LogitsSettings(
        repetition_penalty=1.7,
        frequency_penalty=0.8,
        presence_penalty=-0.6,
        prompt_token_ids=array("q", [1, 3, 70_000]),
    ),
    "grammar": LogitsSettings(grammar="x", allowed_token_ids=array("q", [1, 2, 3])),
    "another grammar": LogitsSettings(grammar="x", allowed_token_ids=array("q", [6, 8])),
    "all": LogitsSettings(
        grammar="x",
        bad_words=((2, 12),),
        logit_bias=((20, 5.0), (24, -3.0), (2, 30.0)),
        repetition_penalty=0.6,
        frequency_penalty=1.9,
        presence_penalty=1.1,
        prompt_token_ids=array("q", range(0, 60, 2)),
    ),
}


def made(num_rows: int, vocab: int, scale: float = 3.0, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def seeded(params: DrawParams, count: int) -> list[DrawParams]:
    """Draws of seeds beyond 32 bits too, and of different positions."""
    return [changed(params, seed=seed * 0x1_2345_6789 % 2**63, first_output_index=seed % 97) for seed in range(count)]


def sampled(sampler, logits: Tensor, *args) -> Sampled:
    return sampler.sample(HeadOutput(logits, None), *args)


def edited_batch(vocab: int, seed: int = 0, **changes) -> tuple[Tensor, list[DrawParams], dict[int, bytes]]:
    """Each setting once with a draw and once without, among rows without any."""
    outputs = (*(int(x) for x in torch.arange(30) * 7919 % 37), 4, 4, 9, 1, 2)
    settings_of = [None, *SETTINGS.values(), *SETTINGS.values()]
    draws = [
        changed(
            PLAIN,
            seed=seed + row,
            first_output_index=len(outputs),
            temperature=float(row > len(SETTINGS)),
            logits_settings=item,
            output_token_ids=outputs if item is not None and item.look_back else (),
            **changes,
        )
        for row, item in enumerate(settings_of)
    ]
    mask = bytes([0b0101_0110, 0b1000_0000, 0, 255] * 5)
    masks = {row: mask for row, item in enumerate(settings_of) if item is not None and item.grammar}
    return made(len(draws), vocab, 4.0, seed + 1), draws, masks
