"""Logits processors in PyTorch, an oracle: edits of the logits rows of requests that ask for them, before a draw.

The order is grammar, allowed tokens, bad words and the minimum length, bias, then repetition, frequency and presence
penalty. Nearly all of it touches single logits; only grammar and allowed tokens rewrite a whole row. Every edit uses
its row's own numbers, in float32, element by element, so a row does not depend on the others.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams, LogitsSettings, banned_token_ids

_MINUS_INF = float("-inf")


def apply_logits_processors(
    logits: Tensor, draws: Sequence[DrawParams], masks: Mapping[int, bytes] | None = None
) -> None:
    """Edits `logits` [N, vocab], float32 and contiguous, in place. Every one of `draws` has settings.

    `masks` are those of the rows that have a grammar (`grammar_masks.py`), by row; nothing breaks a grammar. Where the
    bans would leave no token, the row keeps its allowed ones and the bans are off: a draw needs a token.
    """
    logits_settings = [_logits_settings(params) for params in draws]
    if masks:
        keep_grammatical(logits, masks)
    keep_allowed(logits, logits_settings)
    ban(logits, [banned_token_ids(params) for params in draws])
    add_bias(logits, logits_settings)
    if any(item.penalize for item in logits_settings):
        outputs = [params.output_token_ids if _logits_settings(params).penalize else () for params in draws]
        penalize(logits, logits_settings, outputs)


def keep_grammatical(logits: Tensor, masks: Mapping[int, bytes]) -> None:
    """-inf where a row's mask has no bit set, and for tokens beyond it, which a model may have for padding."""
    rows = list(masks)
    packed = np.stack([np.frombuffer(masks[row], np.uint8) for row in rows])
    allowed = torch.from_numpy(np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little"))
    logits[rows] = logits[rows].masked_fill(allowed.to(logits.device) == 0, _MINUS_INF)


def keep_allowed(logits: Tensor, logits_settings: Sequence[LogitsSettings]) -> None:
    """-inf for all but the allowed tokens, in rows that have such.

    A row stays as it is if it allows no known token, or none that its grammar does.
    """
    for row, item in enumerate(logits_settings):
        if item.allowed_token_ids is not None:
            token_ids = _known(item.allowed_token_ids, logits.shape[1]).to(logits.device)
            kept = logits[row, token_ids]
            if len(token_ids) and not (item.grammar and kept.max() == _MINUS_INF):
                logits[row] = _MINUS_INF
                logits[row, token_ids] = kept


def ban(logits: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
    """-inf for the given tokens of each row, unless that leaves the row none."""
    places = _places(logits, token_ids)
    if len(places) == 0:
        return
    flat = logits.view(-1)
    before = flat[places]
    flat[places] = _MINUS_INF
    is_empty = logits.amax(1) == _MINUS_INF
    flat[places] = before.masked_fill(~is_empty[places // logits.shape[1]], _MINUS_INF)


def add_bias(logits: Tensor, logits_settings: Sequence[LogitsSettings]) -> None:
    """Adds each row's bias."""
    vocab_size = logits.shape[1]
    biases = [
        (row * vocab_size + token_id, bias)
        for row, item in enumerate(logits_settings)
        for token_id, bias in item.logit_bias
        if token_id < vocab_size
    ]
    if biases:
        places, values = zip(*biases, strict=True)
        logits.view(-1)[torch.tensor(places, device=logits.device)] += logits.new_tensor(values)


def penalize(logits: Tensor, logits_settings: Sequence[LogitsSettings], outputs: Sequence[Sequence[int]]) -> None:
    """Repetition penalty on the tokens of prompt and output, then frequency and presence penalty on the output's.

    `outputs` are each row's output so far, empty for a row without penalties.
    """
    flat, vocab_size = logits.view(-1), logits.shape[1]
    counted, counts = torch.unique(_places(logits, outputs), return_counts=True)
    prompts = _places(logits, [item.prompt_token_ids for item in logits_settings])
    seen = torch.unique(torch.cat([counted, prompts]))
    repetition = logits.new_tensor([item.repetition_penalty for item in logits_settings])[seen // vocab_size]
    values = flat[seen]
    flat[seen] = torch.where(values > 0, values / repetition, values * repetition)
    rows = counted // vocab_size
    flat[counted] -= logits.new_tensor([item.frequency_penalty for item in logits_settings])[rows] * counts
    flat[counted] -= logits.new_tensor([item.presence_penalty for item in logits_settings])[rows]


def _logits_settings(params: DrawParams) -> LogitsSettings:
    assert params.logits_settings is not None, "only rows with logits processors come here"
    return params.logits_settings


def _places(logits: Tensor, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Where in the flattened `logits` the tokens of each row are; on its device."""
    vocab_size = logits.shape[1]
    parts = [_known(ids, vocab_size) + row * vocab_size for row, ids in enumerate(token_ids) if len(ids)]
    return (torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)).to(logits.device)


def _known(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    """Token ids, at least one, as a tensor on the CPU, without those that no logit stands for."""
    known = token_ids if isinstance(token_ids, array) else array("q", token_ids)
    ids = torch.frombuffer(known, dtype=torch.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]
