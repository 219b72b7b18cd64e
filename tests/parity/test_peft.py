"""Adapters that PEFT itself has written, beside PEFT's own forward."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.families import save_tiny_model
from tests.parity.hybrids import PATTERNS, save_hybrid
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.cpu.test_adapters import Adapted, stated

peft = pytest.importorskip("peft", reason="needs the dev extra: pip install peft accelerate")

pytestmark = pytest.mark.timeout(300)  # the first import of PEFT compiles it

QKV, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
SHARED = [f"shared_expert{s}.{one}" for one in MLP for s in ("", "s")]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "linear_attn.out_proj"]
FAMILIES = {
    "llama": {"target_modules": "all-linear", "r": 8},
    "qwen2": {"target_modules": QKV + MLP, "r": 33, "lora_alpha": 20, "use_rslora": True},
    "qwen3": {"target_modules": r".*\.layers\.\d+\.(self_attn|mlp)\.\w+_proj", "r": 4},
    "mistral": {"target_modules": QKV, "r": 6, "rank_pattern": {"q_proj": 3, r"layers\.1\.self_attn\.v_proj": 17}},
    "gemma2": {"target_modules": [*QKV, *MLP], "r": 8, "alpha_pattern": {"down_proj": 2, r"0\.mlp\.up_proj": 64}},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj", "o_proj"], "r": 16},
    "gpt_neox": {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], "r": 8},
    "gemma3_text": {"target_modules": ["v_proj", "embed_tokens", "lm_head"], "r": 4},
    "qwen3_moe": {"target_modules": ["o_proj", "embed_tokens"], "r": 5},
    "granite": {"target_modules": r".*(down_proj|lm_head|embed_tokens)", "r": 3},
    "olmo2": {"target_modules": ["q_proj", "v_proj"], "r": 1, "layers_to_transform": [1]},
    # mixtures: experts, routers, experts that all tokens share
    "mixtral": {"target_modules": QKV, "target_parameters": [*EXPERTS, "gate.weight"], "r": 4},
    "gpt_oss": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "router.weight"], "r": 3},
    "qwen2_moe": {"target_modules": [*SHARED, "shared_expert_gate"], "target_parameters": EXPERTS, "r": 17},
    "olmoe": {"target_parameters": ["mlp.experts.down_proj"], "r": 2, "use_rslora": True},
    "granitemoe": {"target_parameters": [*EXPERTS, "router.weight"], "r": 4},
    "ernie4_5_moe": {"target_parameters": EXPERTS, "r": 4, "rank_pattern": {"experts.down_proj": 9}},
    "gemma4_text": {"target_modules": MLP, "target_parameters": EXPERTS, "r": 4},
    "gemma4_text, shared keys": {
        "target_modules": r".*(per_layer_(input_gate|projection|model_projection)|up_proj|q_proj)",
        "r": 4,
    },
    # latent attention
    "deepseek_v3": {"target_modules": LATENT, "target_parameters": EXPERTS, "r": 4},
    "deepseek_v2": {"target_modules": [*LATENT, *SHARED], "r": 4},
    "deepseek_v3, whole queries": {"target_modules": ["kv_b_proj"], "r": 19},
    # states
    "mixture": {"target_modules": DELTA, "target_parameters": [*EXPERTS, "gate.weight"], "r": 4},
    "by key heads, mixture": {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj"], "r": 4},
    "conv, mixture": {"target_modules": ["in_proj", "out_proj", "w1"], "target_parameters": EXPERTS, "r": 4},
    "granite, mixture": {"target_modules": ["in_proj", "input_linear"], "target_parameters": EXPERTS, "r": 4},
    "nemotron": {"target_modules": ["in_proj", "k_proj"], "target_parameters": ["up_proj", "down_proj"], "r": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_forward_of_peft(family, tmp_path):
    is_hybrid = family in PATTERNS
    base = save_hybrid(tmp_path / "base", family) if is_hybrid else save_tiny_model(family, tmp_path / "base")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    config = peft.LoraConfig(
        **{"lora_alpha": 16, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | FAMILIES[family]
    )
    theirs = peft.get_peft_model(model, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ids = tokens(50)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        with theirs.disable_adapter():
            plain = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    ours = Adapted(stated(base, dtype="float32")).put(base, tmp_path / "adapter")
    found = ours.alone(1, ids)[:, : expected.shape[1]]
    ours.close()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max(), "the adapter changes something"
