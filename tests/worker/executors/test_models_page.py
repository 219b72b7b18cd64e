"""The table of docs/models.md is that of the recognizer; this prints what it should be where it is not."""

from pathlib import Path

from holdfast.worker.models.families import FAMILIES, Family, NormKind, QkvPacking
from tests.parity.families import SERVED
from tests.worker.executors.test_recognize import NOT_SPLIT

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
LLAMA = Family()
NORMS = {
    NormKind.RMS_PLUS_ONE: "RMSNorm by 1 + w",
    NormKind.LAYER: "LayerNorm",
    NormKind.LAYER_PLUS_ONE: "LayerNorm by 1 + w",
    NormKind.LAYER_WITHOUT_WEIGHTS: "LayerNorm without weights",
}


def table() -> list[str]:
    """Every family that the parity tests serve."""
    head = ["| model type | one rank | several ranks | differs from llama by |", "|---|---|---|---|"]
    return head + [row(name, FAMILIES.get(name)) for name in sorted(SERVED)]


def row(name: str, family: Family | None) -> str:
    if family is None:
        return f"| `{name}` | HF | HF | |"
    several = "HF" if name in NOT_SPLIT else "native"
    return f"| `{name}` | native | {several} | {', '.join(differences(family))} |"


def differences(family: Family) -> list[str]:
    sandwich = family.attention_out_norm is not None and family.attention_norm is not None
    after = family.attention_norm is None
    scaled = any(
        getattr(family, f"{what}_scale") is not getattr(LLAMA, f"{what}_scale") for what in ("logit", "residual")
    )
    said = {
        NORMS.get(family.norm, ""): family.norm in NORMS,
        "norms after": after,
        "norms before and after": sandwich,
        "attention and MLP in parallel": family.parallel is not LLAMA.parallel,
        "fused QKV": len(family.qkv) == 1 or family.packing is not QkvPacking.APART,
        "fused gate and up": family.has_gate and len(family.gate_up) == 1,
        "rotary pairs are neighbours": family.interleaved,
        "norms of queries and keys after rotation": family.norms_after_rotation,
        "queries that grow with their position": family.query_scale is not LLAMA.query_scale,
        "layers without positions": family.rotates is not LLAMA.rotates,
        "windows": family.window is not LLAMA.window,
        "softcap": family.softcap is not None or family.logit_softcap is not None,
        "plain MLP": not family.has_gate,
        "experts": family.moe is not None,
        "a bias of choice": family.moe is not None and family.moe.selection_bias is not None,
        "sinks": family.moe is not None and family.moe.clamped,
        "scales": scaled,
    }
    return [words for words, holds in said.items() if holds]


def test_the_page_has_the_table_of_the_recognizer():
    lines = PAGE.read_text().splitlines()
    shown = lines[lines.index(table()[0]) :]
    assert shown == table(), "\n".join(["it should be:", *table()])


def test_all_known_families_are_served():
    assert FAMILIES.keys() <= SERVED.keys()
