"""Step cost file, in JSON: written by a benchmark that has fitted the costs, read by capacity simulations.

What may not live here: the cost model (`worker/tuning/step_time.py`) and measuring (`benchmarks/step_model.py`).
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.tuning.step_time import StepCosts

_NAMES: Final = tuple(item.name for item in fields(StepCosts))


def read_step_costs(path: Path) -> StepCosts:
    """The costs in a file; those that it does not name are 0. Raises `ConfigurationError` where they make no sense."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("it is a list or a single value")
        if unknown := entries.keys() - set(_NAMES):
            raise ValueError(f"it does not know {', '.join(sorted(unknown))}")
        costs = StepCosts(**{name: float(entries.get(name, 0.0)) for name in _NAMES})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"--step-model {path}: {error}; it must be an object of {', '.join(_NAMES)}"
        ) from error
    if not costs.base_s > 0 or not min(asdict(costs).values()) >= 0:
        raise ConfigurationError(f"--step-model {path}: base_s must be above 0, and nothing below it")
    return costs


def write_step_costs(path: Path, costs: StepCosts) -> None:
    path.write_text(json.dumps(asdict(costs), indent=2) + "\n", encoding="utf-8")
