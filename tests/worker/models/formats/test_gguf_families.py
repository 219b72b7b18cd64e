"""Every family of GGUF files in every type, on 1, 2, 3 and 4 ranks: what a rank reads is what it reads of the numbers.

In bfloat16 and as units. `make test` has one type and one number of ranks a family, by turns; the rest is slow, and
so are hybrids in types of 256 numbers, whose matrices are large.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from holdfast.worker.models.formats.gguf_folder import hf_folder
from tests.parity.families import settings_of
from tests.parity.hybrids import PATTERNS
from tests.worker.models.formats.comparison import differences_between
from tests.worker.models.formats.gguf_files import ARCHITECTURES, K_KINDS, KINDS, TURNS, write_model
from tests.worker.models.formats.gguf_hybrid_files import CONVERTED, in_blocks, sizes_of_blocks, write_hybrid

FAMILIES = (*ARCHITECTURES, *CONVERTED)
RANKS = (1, 2, 3, 4)
WHOLE = ("cohere", "minimax_m2", "olmo2", "olmo3", "olmoe", "stablelm")
"""Families whose norms over all heads keep the native backend to one rank."""


def written(family: str, kind: str, where: Path, *, of_three: bool) -> tuple[Path, Path]:
    """A file in a type, and a file or folder of its numbers."""
    unit, num_heads = 256 if kind in K_KINDS else 32, 3 if of_three else 4
    if family in ARCHITECTURES:
        own = {**settings_of(family)[1], **TURNS.get(family, {}), "head_dim": 32}
        model = write_model(family, where, kind, **sizes_of_blocks(own, unit, num_heads))
        return model.file, model.folder
    _, pattern = CONVERTED[family]
    model_type, changes = PATTERNS.get(pattern, (pattern, {}))
    changes = sizes_of_blocks({**settings_of(model_type)[1], **changes}, unit, num_heads)
    for folder in ("blocks", "numbers"):
        (where / folder).mkdir(parents=True)
    ours = write_hybrid(family, where / "blocks", kind, **changes)
    theirs = write_hybrid(family, where / "numbers", change=partial(in_blocks, kind=kind), **changes)
    return ours.file, theirs.file


def faults(family: str, kind: str, where: Path, ranks: Sequence[int] = RANKS) -> list[str]:
    """What differs on any number of ranks, or is not read."""
    found: list[str] = []
    ranks = (1,) if family in WHOLE else ranks
    for of_three in (False, True):
        own = [size for size in ranks if (size == 3) == of_three]
        if not own:
            continue
        files = written(family, kind, where / str(of_three), of_three=of_three)
        ours, theirs = (one if one.is_dir() else hf_folder(one, "model") for one in files)
        dtype = "auto" if family in ARCHITECTURES else "bfloat16"
        for size in own:
            reason, places = differences_between(ours, theirs, size, ("bfloat16", "auto"), dtype=dtype)
            found += [f"{size} ranks: {place}" for place in (*places, *filter(None, [reason]))]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_one_type_is_its_numbers(family, tmp_path):
    turn = FAMILIES.index(family)
    kinds = KINDS if family in ARCHITECTURES else [kind for kind in KINDS if kind not in K_KINDS]
    assert faults(family, kinds[turn % len(kinds)], tmp_path, [RANKS[turn % len(RANKS)]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_any_type_is_its_numbers(family, kind, tmp_path):
    assert faults(family, kind, tmp_path) == []
