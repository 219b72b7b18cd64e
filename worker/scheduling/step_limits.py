"""Step limits: the most that one step may do. A batching policy keeps to them; they may be replaced between two steps.

They start as the settings say (`worker/config.py`). What may not live here: choosing other ones (`worker/tuning/`).
"""

from dataclasses import dataclass

from holdfast.worker.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of one step."""

    max_num_batched_tokens: int
    """Tokens, of prompts and of decodes together."""
    max_num_seqs: int
    """Sequences that run. Lowered below those that run already, it only keeps others from joining them."""
    max_num_prefill_tokens: int | None = None
    """Those of `max_num_batched_tokens` that may be of prompts in a step that also decodes; None: all."""
    num_speculative_tokens: int = 0
    """Most tokens guessed ahead for one of them."""

    @classmethod
    def of(cls, config: SchedulerConfig, num_speculative_tokens: int = 0) -> "StepLimits":
        """As the settings have them."""
        return cls(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        )
