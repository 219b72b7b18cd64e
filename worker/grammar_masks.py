"""Which tokens may come next in an output that must match a grammar, by llguidance.

What may live here: the readers that follow outputs through their grammars, on the leader alone. What may not: logits
(`logit_controls.py`). A mask is a function of the grammar and the output so far; a reader that is kept from step to
step only saves reading the output again.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from worker.plan import DrawParams, ScheduledSequence, StepPlan

logger = logging.getLogger(__name__)

_KEPT_STEPS: Final = 32
"""A reader whose sequence has not drawn for so many steps is dropped. If the sequence comes back, it starts over."""


@dataclass(slots=True)
class _Reader:
    """A grammar and how much of an output it has read."""

    matcher: LLMatcher
    token_ids: tuple[int, ...]
    last_step_id: int


class GrammarMasks:
    """The masks of one replica's steps. They are made on a thread of their own, while the model runs."""

    def __init__(self, folder: str, eos_token_ids: frozenset[int]) -> None:
        self._path = Path(folder) / "tokenizer.json"
        self._eos_token_ids = eos_token_ids
        self._readers: dict[int, _Reader] = {}  # by sequence id
        self._thread = ThreadPoolExecutor(1, "grammar-masks")

    def start(self, plan: StepPlan) -> "Future[dict[int, bytes]] | None":
        """Begins with `masks`; None where the plan has no grammar, which costs nothing. One plan at a time."""
        if not any(sequence.draw is not None and _grammar(sequence.draw) for sequence in plan.sequences):
            return None
        return self._thread.submit(self.masks, plan)

    def masks(self, plan: StepPlan) -> dict[int, bytes]:
        """By number of a plan's logits row, a bit for each token of the tokenizer, the lowest first: it may come next.

        An end of sequence may come where the grammar is fulfilled; once it is and nothing can follow, only that may.
        Rows without a grammar have no mask, nor those after a draft that breaks it, since their draws do not count.
        """
        masks: dict[int, bytes] = {}
        row = 0
        for sequence in plan.sequences:
            if sequence.draw is not None and _grammar(sequence.draw):
                masks |= enumerate(self._sequence_masks(sequence, sequence.draw, plan.step_id), row)
            row += sequence.num_draws if sequence.draw is not None else 0
        for sequence_id, reader in list(self._readers.items()):
            if reader.last_step_id < plan.step_id - _KEPT_STEPS:
                del self._readers[sequence_id]
        return masks

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        self._thread.shutdown()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Read when the first grammar comes: most replicas never see one."""
        return LLTokenizer(self._path.read_text(encoding="utf-8"), eos_token=sorted(self._eos_token_ids))

    def _sequence_masks(self, sequence: ScheduledSequence, draw: DrawParams, step_id: int) -> list[bytes]:
        """The mask of each draw; draw i comes after i drafts, which the reader takes back afterwards."""
        matcher = self._matcher_after(sequence.sequence_id, draw, step_id)
        masks = [matcher.compute_bitmask()]
        num_read = 0
        for draft in sequence.token_ids[len(sequence.token_ids) - sequence.num_draws + 1 :]:
            if draft in self._eos_token_ids or matcher.validate_tokens([draft]) == 0:
                break
            matcher.consume_token(draft)
            num_read += 1
            masks.append(matcher.compute_bitmask())
        if num_read:
            matcher.rollback(num_read)
        if matcher.is_error():  # its masks now allow an end of sequence and nothing else
            logger.warning("the output of sequence %d ends early: %s", sequence.sequence_id, matcher.get_error())
        return masks

    def _matcher_after(self, sequence_id: int, draw: DrawParams, step_id: int) -> LLMatcher:
        """The matcher that has read the output before `draw`."""
        token_ids = draw.output_token_ids
        reader = self._readers.get(sequence_id)
        if reader is None or token_ids[: len(reader.token_ids)] != reader.token_ids:
            matcher = LLMatcher(self._tokenizer, _grammar(draw), log_level=0)
            reader = self._readers[sequence_id] = _Reader(matcher, (), step_id)
        reader.matcher.consume_tokens(list(token_ids[len(reader.token_ids) :]))
        reader.token_ids, reader.last_step_id = token_ids, step_id
        return reader.matcher


def _grammar(draw: DrawParams) -> str:
    """The grammar of a draw; empty for none."""
    return draw.controls.grammar if draw.controls is not None else ""
