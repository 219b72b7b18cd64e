"""The table of docs/models.md is that of the stated families; this prints what it should be where it is not."""

from pathlib import Path

from holdfast.worker.models.families import DECODERS
from holdfast.worker.models.family import Family, NormKind, Packing, Windows
from tests.parity.families import NOT_SPLIT, SERVED

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
LLAMA = DECODERS["llama"]
NORMS = {
    NormKind.RMS_PLUS_ONE: "RMSNorm by 1 + w",
    NormKind.LAYER: "LayerNorm",
    NormKind.LAYER_PLUS_ONE: "LayerNorm by 1 + w",
    NormKind.LAYER_WITHOUT_WEIGHTS: "LayerNorm without weights",
}


def table() -> list[str]:
    """Every family that the parity tests serve."""
    head = ["| model type | one rank | several ranks | differs from llama by |", "|---|---|---|---|"]
    return head + [row(name, DECODERS.get(name)) for name in sorted(SERVED.keys() | DECODERS.keys())]


def row(name: str, family: Family | None) -> str:
    if family is None:
        return f"| `{name}` | HF | HF | |"
    if family.on_cpus_alone:
        backend = "native, on CPUs" if family.keeps_state else "native; HF on GPUs"
        return f"| `{name}` | {backend} | {backend} | {', '.join(differences(family))} |"
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
        "attention and MLP in parallel": family.parallel is not False,
        "fused QKV": family.packing is not Packing.APART,
        "fused gate and up": family.has_gate and len(family.gate_up) == 1,
        "norms of queries and keys after rotation": family.norms_after_rotation,
        "queries that grow with their position": family.query_scale is not LLAMA.query_scale,
        "rotary pairs are neighbours": bool(family.interleaved),
        "layers without positions": family.rotates is not LLAMA.rotates,
        "windows": family.windows is not Windows.NONE,
        "softcap": family.softcap is not None or family.logit_softcap is not None,
        "plain MLP": not family.has_gate,
        "experts": family.moe is not None,
        "experts beside an MLP": family.beside is not None,
        "norms of values": family.norms_values,
        "scaled layers": family.output_scale is not None,
        "layers that share keys and values": family.shared_kv is not None,
        "inputs of layers' own": family.own_inputs is not None,
        "a selection bias": family.moe is not None and family.moe.selection_bias is not None,
        "sinks": family.sinks,
        "[latent attention](latent-attention.md)": family.latent,
        "scales": scaled,
        "gates on what attention gives": family.has_output_gate,
        "[Gated DeltaNet](gated-delta-net.md)": family.delta_net is not None,
        "[Mamba2](mamba2.md)": family.mamba is not None,
        "[states](state-cache.md) in place of keys and values in some layers": family.keeps_state
        and "hybrid" not in family.state_lengths,
        "[states](state-cache.md) beside keys and values": "hybrid" in family.state_lengths,
    }
    return [words for words, holds in said.items() if holds]


def test_the_page_has_the_table_of_the_families():
    lines = PAGE.read_text().splitlines()
    shown = lines[lines.index(table()[0]) :]
    assert shown == table(), "\n".join(["it should be:", *table()])


def test_all_known_families_are_served():
    assert {name for name, family in DECODERS.items() if not family.keeps_state} <= SERVED.keys()
