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
    """Running sequences. If lowered below the number that runs now, it only stops new admissions."""
    max_num_prefill_tokens: int | None = None
    """Prompt tokens of a step that also decodes; None: as `max_num_batched_tokens`."""
    num_speculative_tokens: int = 0
    """Draft tokens for one sequence."""

    @classmethod
    def of(cls, config: SchedulerConfig, num_speculative_tokens: int = 0) -> "StepLimits":
        """The limits of the settings."""
        return cls(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        )
