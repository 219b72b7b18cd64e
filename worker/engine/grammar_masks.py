"""Grammar masks by llguidance, on the leader only: the tokens that may come next in a structured output."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from holdfast.worker.grammar_matchers import NONE_FITS, GrammarMatchers, grammar_tokenizer, rows_with_grammars
from holdfast.worker.models.formats.gguf_folder import hf_folder
from holdfast.worker.step_plan import StepPlan

logger = logging.getLogger(__name__)

MASK_LIMIT_S: Final = 30.0
"""The masks of one sequence in one step may take so long; the first of a replica include loading the tokenizer."""

_LOOK_S: Final = 0.2

MakeMatchers = Callable[[], GrammarMatchers]


class WaitedMasks:
    """The masks of one step, on their way."""

    def __init__(self, plan: StepPlan, matchers: GrammarMatchers, thread: ThreadPoolExecutor) -> None:
        self._plan = plan
        self._found: list[dict[int, bytes]] = []  # by sequence; grows by single appends of the thread
        self._future: Future[None] = thread.submit(self._work, matchers)

    def _work(self, matchers: GrammarMatchers) -> None:
        for masks in matchers.each(self._plan):
            self._found.append(masks)

    def wait(self, limit_s: float, note_progress: Callable[[], None]) -> tuple[dict[int, bytes], bool]:
        """The masks by row, and whether they are all there in time. `limit_s` is for each sequence.

        A request whose mask takes longer gets `NONE_FITS`, and so do the ones after it, which the thread has not
        reached.
        """
        num_found, waited_s = 0, 0.0
        while True:
            try:
                self._future.result(_LOOK_S)
                return _joined(self._found), True
            except TimeoutError:
                note_progress()
            waited_s = waited_s + _LOOK_S if len(self._found) == num_found else 0.0
            num_found = len(self._found)
            if waited_s >= limit_s:
                break
        found = self._found[:num_found]
        late = rows_with_grammars(self._plan)[num_found:]
        return _joined(found) | {row: NONE_FITS for rows in late for row in rows}, False


class GrammarMasks:
    """The masks of one replica's steps. They are made on a separate thread, while the model runs."""

    def __init__(self, path: str, eos_token_ids: frozenset[int], make_matchers: MakeMatchers | None = None) -> None:
        """`path`: where the tokenizer is, as `ModelInfo` says. Tests replace llguidance by `make_matchers`."""
        self._path = hf_folder(Path(path), path) / "tokenizer.json"
        self._eos_token_ids = eos_token_ids
        self._make_matchers = make_matchers or (lambda: GrammarMatchers(self._matcher, eos_token_ids))
        self._matchers = self._make_matchers()
        self._thread = ThreadPoolExecutor(1, "grammar-masks")

    def start(self, plan: StepPlan) -> WaitedMasks | None:
        """Begins with the masks of a plan; None where it has no grammar, which costs nothing. One plan at a time."""
        return WaitedMasks(plan, self._matchers, self._thread) if plan.has_grammars else None

    def collect(
        self, waiting: WaitedMasks, note_progress: Callable[[], None], limit_s: float = MASK_LIMIT_S
    ) -> dict[int, bytes]:
        """Like `GrammarMatchers.masks`, once the masks are there. `note_progress` is called again and again meanwhile.

        Masks that take too long are a dead end of their request. The thread cannot be interrupted: it is left behind
        with the matchers that it uses, and the other sequences start over on another.
        """
        masks, are_all_there = waiting.wait(limit_s, note_progress)
        if not are_all_there:
            logger.error("the masks of a grammar took more than %.0f s: its request fails", limit_s)
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
            self._matchers = self._make_matchers()
        return masks

    def masks(self, plan: StepPlan) -> dict[int, bytes]:
        """Same as `GrammarMatchers.masks`."""
        return self._matchers.masks(plan)

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        self._thread.shutdown()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Read when the first grammar comes: most replicas never see one."""
        return grammar_tokenizer(self._path, self._eos_token_ids)

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0)


def _joined(found: list[dict[int, bytes]]) -> dict[int, bytes]:
    return {row: mask for masks in found for row, mask in masks.items()}
