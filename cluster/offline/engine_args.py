"""Arguments of `LLM` as a value, by vLLM's names: `EngineArgs`, also from a command line.

The names and what they mean are those of `vllm_arguments.py`. What may not live here: settings, and their checks.
"""

import json
from argparse import ArgumentParser, Namespace
from copy import copy
from dataclasses import asdict, field, make_dataclass
from functools import partial
from typing import Any, Final, Self

from holdfast.cluster.offline.vllm_arguments import NEUTRAL, RENAMED, SHARED, WITHOUT_EFFECT

_NAMED: Final[dict[str, object]] = {
    "model": "demo",
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "seed": 0,
    "max_model_len": None,
    "generation_config": "auto",
    "override_generation_config": None,
    "tokenizer": None,
    "revision": None,
    "tokenizer_revision": None,
    "download_dir": None,
    "hf_overrides": None,
    "kv_cache_dtype": "auto",
    "speculative_config": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
}
"""What `LLM` names itself, and what its translation reads, with the defaults."""

DEFAULTS: Final[dict[str, Any]] = (
    _NAMED
    | dict.fromkeys(sorted(SHARED | RENAMED.keys()))
    | {name: values[0] for name, values in NEUTRAL.items()}
    | dict.fromkeys(sorted(WITHOUT_EFFECT))
)
"""Every argument with its default; None for what is left to the settings."""

_SWITCHES: Final = {"async_scheduling", "enable_prefix_caching"} | WITHOUT_EFFECT
"""They may stand on a command line without a value."""

_SHORT: Final = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}


class _Methods:
    def arguments(self) -> dict[str, Any]:
        """What `LLM(...)` is called with: what differs from the defaults."""
        return {name: value for name, value in asdict(self).items() if value != DEFAULTS[name]}  # type: ignore[call-overload]  # a dataclass is made of it

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Adds a flag for each argument (`--max-model-len`), and `--no-...` for each switch. Returns the parser."""
        for name, default in DEFAULTS.items():
            _add_flag(parser, name, default)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """From what a parser has read. Flags of others are left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in DEFAULTS})


def _add_flag(parser: ArgumentParser, name: str, default: object) -> None:
    flag = name.replace("_", "-")
    flags = [*([_SHORT[name]] if name in _SHORT else []), f"--{flag}", *([f"--{name}"] if name != flag else [])]
    is_switch = name in _SWITCHES or isinstance(default, bool)
    optional: dict[str, Any] = {"nargs": "?", "const": True} if is_switch else {}
    parser.add_argument(
        *flags, dest=name, default=default, type=str if isinstance(default, str) else _value, **optional
    )
    if is_switch:
        parser.add_argument(f"--no-{flag}", dest=name, action="store_const", const=False, default=default)


def _value(text: str) -> object:
    """Numbers, switches and mappings as JSON writes them, and what is none of these as text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _fields() -> list[tuple[str, Any, Any]]:
    return [(name, Any, field(default_factory=partial(copy, value))) for name, value in DEFAULTS.items()]


class EngineArgs(make_dataclass("_EngineArgs", _fields(), bases=(_Methods,))):  # type: ignore[misc]  # made of a table
    """Arguments of `LLM(...)`; those of vLLM that have no meaning here are held, and judged when a model is loaded."""


class AsyncEngineArgs(EngineArgs):
    """The same: there is one engine for both."""
