"""Workload: the cases that every server answers, and their prompts.

All requests of a case arrive at once, decode greedily, or by draws in the cases `f`, and run past the end of sequence.
Prompts are random token ids of a fixed seed, new for every burst, so that a prefix cache helps only where a case wants
it to.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A burst of equal requests."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    max_tokens: int
    num_shared_tokens: int = 0
    """The first tokens of all prompts of a burst are the same."""
    sampling: Mapping[str, float | str] = field(default_factory=dict)
    """How tokens are drawn, by the names that drivers know: `temperature`, `top_p`, `logprobs`, `repetition_penalty`,
    `frequency_penalty`, and `json_schema`, a text. Each request has a seed of its own, its number. Empty: greedy."""
    is_warm: bool = False
    """The shared tokens are the same in all bursts of the case as well: after the first one, a cache may hold them."""

    @property
    def title(self) -> str:
        shared = f"{self.num_shared_tokens} shared + " if self.num_shared_tokens else ""
        own = self.num_prompt_tokens - self.num_shared_tokens
        notes = [{"e_cold": "new prefix", "e_warm": "kept prefix"}.get(self.name, "")]
        for name, value in self.sampling.items():
            notes.append(name.replace("_", " ") + ("" if isinstance(value, str) else f" {value:g}"))
        return ", ".join(filter(None, [f"{self.num_requests} x {shared}{own} in / {self.max_tokens} out", *notes]))

    @property
    def num_output_tokens(self) -> int:
        return self.num_requests * self.max_tokens


_E_COLD: Final = Case(name="e_cold", num_requests=16, num_prompt_tokens=544, max_tokens=32, num_shared_tokens=512)

_DRAWN: Final = Case(
    name="f8", num_requests=8, num_prompt_tokens=128, max_tokens=64, sampling={"temperature": 0.8, "top_p": 0.95}
)

_ENDLESS: Final = '{"type": "array", "items": {"type": "integer"}, "minItems": 200}'
"""A schema whose answers are longer than any case asks for, so that all of them have the same length."""

CASES: Final = {
    case.name: case
    for case in (
        Case(name="a", num_requests=1, num_prompt_tokens=128, max_tokens=64),
        Case(name="b", num_requests=8, num_prompt_tokens=128, max_tokens=64),
        Case(name="c", num_requests=32, num_prompt_tokens=128, max_tokens=64),
        Case(name="d", num_requests=8, num_prompt_tokens=1024, max_tokens=32),
        _E_COLD,
        replace(_E_COLD, name="e_warm", is_warm=True),
        _DRAWN,
        replace(_DRAWN, name="f32", num_requests=32),
        replace(_DRAWN, name="f_logprobs", sampling={**_DRAWN.sampling, "logprobs": 5}),
        replace(
            _DRAWN,
            name="f_penalties",
            sampling={**_DRAWN.sampling, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
        ),
        replace(_DRAWN, name="f_json", sampling={**_DRAWN.sampling, "json_schema": _ENDLESS}),
    )
}

PROBE: Final = Case(name="probe", num_requests=1, num_prompt_tokens=128, max_tokens=1)
"""The first request to a server: its answer ends the start-up."""

CHECK: Final = Case(name="check", num_requests=4, num_prompt_tokens=128, max_tokens=16)
"""What is compared with the reference."""

_GROUPS: Final = {"e": ("e_cold", "e_warm"), "f": ("f8", "f32", "f_logprobs", "f_penalties", "f_json")}
_NUM_BYTES: Final = 256
"""Ids below are single bytes: as output they could leave half a character behind."""
_NUM_SPECIAL: Final = 16


def chosen_cases(names: str) -> list[Case]:
    """`a,b,e` as cases; `e` and `f` stand for all of their kinds. Raises `ValueError` for a name that is none."""
    expanded = [one for name in names.split(",") for one in _GROUPS.get(name, (name,))]
    if unknown := [name for name in expanded if name not in CASES]:
        raise ValueError(f"cases: no such case: {', '.join(unknown)}; there are {', '.join([*CASES, *_GROUPS])}")
    return [CASES[name] for name in expanded]


def prompts(case: Case, vocab_size: int, burst: str) -> list[list[int]]:
    """The prompts of one burst: the same for the same name, wherever they are made."""
    own = random.Random(f"{case.name}/{burst}")
    prefix = random.Random(f"{case.name}/prefix/{'kept' if case.is_warm else burst}")
    shared = _ids(prefix, vocab_size, case.num_shared_tokens)
    num_own = case.num_prompt_tokens - case.num_shared_tokens
    return [shared + _ids(own, vocab_size, num_own) for _ in range(case.num_requests)]


def _ids(source: random.Random, vocab_size: int, count: int) -> list[int]:
    lowest = _NUM_BYTES if vocab_size > 2 * _NUM_BYTES else 0
    return [source.randrange(lowest, vocab_size - _NUM_SPECIAL) for _ in range(count)]
