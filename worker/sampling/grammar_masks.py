"""Grammar masks by llguidance, on the leader alone: which tokens may come next in an output that must match a grammar.

What may live here: the model's tokenizer as llguidance reads it, and the thread that computes masks while the model
runs. What may not: how much of each output was consumed (`worker/plan/grammar_matchers.py`), and logits
(`logits_processors.py`).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from holdfast.worker.plan.grammar_matchers import GrammarMatchers, has_grammars
from holdfast.worker.plan.step_plan import StepPlan


class GrammarMasks:
    """The masks of one replica's steps. They are made on a thread of their own, while the model runs."""

    def __init__(self, folder: str, eos_token_ids: frozenset[int]) -> None:
        self._path = Path(folder) / "tokenizer.json"
        self._eos_token_ids = eos_token_ids
        self._matchers = GrammarMatchers(self._matcher, eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "grammar-masks")

    def start(self, plan: StepPlan) -> "Future[dict[int, bytes]] | None":
        """Begins with `masks`; None where the plan has no grammar, which costs nothing. One plan at a time."""
        return self._thread.submit(self.masks, plan) if has_grammars(plan) else None

    def masks(self, plan: StepPlan) -> dict[int, bytes]:
        """As `GrammarMatchers.masks`."""
        return self._matchers.masks(plan)

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        self._thread.shutdown()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Read when the first grammar comes: most replicas never see one."""
        return LLTokenizer(self._path.read_text(encoding="utf-8"), eos_token=sorted(self._eos_token_ids))

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0)
