"""Default sampling parameters of a model: what its generation_config.json asks for, as vLLM reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.parameters import Group
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams

_MAX_TOKENS: Final = "max_new_tokens"
"""The one parameter that has another name here."""


def default_params(folder: Path, source: str, overrides: Mapping[str, object]) -> SamplingParams:
    """`source`: `auto` is the model's `folder`, `vllm` is nothing, anything else another folder.

    Raises `ConfigurationError` for a file that cannot be read, and `InvalidRequestError` for a value in it.
    """
    wanted = dict[str, object]() if source == "vllm" else _read(folder if source == "auto" else Path(source))
    wanted |= overrides
    drawn_by = [name for name, parameter in PARAMETERS.items() if parameter.metadata.group is Group.SAMPLING]
    given = {name: wanted[name] for name in drawn_by if wanted.get(name) is not None}
    if wanted.get(_MAX_TOKENS) is not None:
        given["max_tokens"] = wanted[_MAX_TOKENS]
    return SamplingParams(**given)  # type: ignore[arg-type]  # they are checked there


def _read(folder: Path) -> dict[str, object]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    return dict(content) if isinstance(content, Mapping) else {}
