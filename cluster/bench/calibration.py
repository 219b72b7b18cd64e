"""Calibration: two short requests that show that the server answers, and how it counts the tokens of a prompt.

What may not live here: what the counts mean for texts (`prompts.py`).
"""

import asyncio
from typing import Final

from holdfast.cluster.bench.prompts import Calibration, PromptTexts
from holdfast.cluster.bench.sender import Ask, Sender, SendFailed
from holdfast.worker.errors import ConfigurationError

_FEW_WORDS: Final = 8
_MANY_WORDS: Final = (192, 32)
"""The second is for models of a short context."""
_PATIENCE_S: Final = 120.0
_WAY_OUT: Final = "is the server up there, and does it take --protocol and --model? `holdfast serve` starts one of ours"


async def calibrate(sender: Sender, seed: int) -> Calibration:
    """One word is one token where the server does not count. Raises `ConfigurationError` if it does not answer."""
    texts = PromptTexts(seed, Calibration())
    few = await _num_tokens(sender, texts, _FEW_WORDS)
    if few is None:
        return Calibration()
    for num_words in _MANY_WORDS:
        try:
            many = await _num_tokens(sender, texts, num_words)
        except ConfigurationError:
            if num_words == _MANY_WORDS[-1]:
                raise
        else:
            return Calibration() if many is None else Calibration.of([(_FEW_WORDS, few), (num_words, many)])
    raise AssertionError


async def _num_tokens(sender: Sender, texts: PromptTexts, num_words: int) -> int | None:
    ask = Ask((texts.words(f"probe {num_words}", num_words),), 1)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return (await sender.send(ask, lambda *, is_silent_end=False: None)).num_prompt_tokens
    except TimeoutError:
        told = f"no answer within {_PATIENCE_S:g} s"
    except SendFailed as failed:
        told = f"{failed.kind}: {failed.message}"
    raise ConfigurationError(f"--server: a first request of {num_words} words has failed ({told}); {_WAY_OUT}")
