"""How long a step takes: a linear model of what it computes, as a benchmark run has fitted it.

What may not live here: measuring (`benchmarks/step_model.py`).
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from worker.errors import ConfigurationError
from worker.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Seconds of one step of one replica."""

    base_s: float
    """Of any step, however small."""
    per_token_s: float = 0.0
    """For each token that is computed."""
    per_context_token_s: float = 0.0
    """For each token that a sequence of the step attends to, those computed included."""
    per_sequence_s: float = 0.0
    """For each sequence of the step."""

    def seconds(self, plan: StepPlan) -> float:
        num_tokens = num_context = 0
        for sequence in plan.sequences:
            num_tokens += len(sequence.token_ids)
            num_context += sequence.first_position + len(sequence.token_ids)
        return (
            self.base_s
            + self.per_token_s * num_tokens
            + self.per_context_token_s * num_context
            + self.per_sequence_s * len(plan.sequences)
        )

    @classmethod
    def read(cls, path: Path) -> "StepModel":
        """The model in a JSON file. Raises `ConfigurationError` where there is none."""
        names = [field.name for field in fields(cls)]
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            model = cls(**{name: float(entries[name]) for name in names if name in entries})
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"--step-model {path}: {error}; it must be an object of {names}") from error
        if model.base_s <= 0 or min(asdict(model).values()) < 0:
            raise ConfigurationError(f"--step-model {path}: base_s must be above 0, and nothing below it")
        return model

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
