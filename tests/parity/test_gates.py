"""What would run silently wrong is refused, with the model type, the reason and a way out."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.engine.model_runner import ModelRunner
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.checks import check_config, check_heads, choose_max_model_len
from holdfast.worker.models.linear import RowParallelLinear
from holdfast.worker.models.parallel_plan import ParallelPlan
from holdfast.worker.models.weights import read_config
from tests.fake_group import run_ranks
from tests.parity.families import REFUSED, save_tiny_model
from tests.parity.harness import load, on_ranks, worker_config


def config(**values):
    base = {"model_type": "some_model", "architectures": ["SomeForCausalLM"], "num_attention_heads": 4}
    return SimpleNamespace(**{**base, "max_position_embeddings": 128, **values})


def assert_names_type_reason_and_way_out(error: UnsupportedModelError, model_type: str, reason: str) -> None:
    assert error.model_type == model_type
    assert reason in error.reason
    assert "cannot be served" not in error.reason, "a refusal is not wrapped in another"
    assert error.way_out
    assert model_type in str(error)
    assert error.reason in str(error)
    assert error.way_out in str(error)


REASONS = {
    "bloom": "implements attention or a state itself",
    "codegen": "implements attention or a state itself",
    "diffllama": "several times a token (4 attention calls in 2 modules)",
    "falcon": "does not accept an attention function",
    "gptj": "does not accept an attention function",
    "llama4_text": "chunked_attention layers",
    "mamba": "linear_attention layers",
    "mpt": "alibi",
    "olmo_hybrid": "linear_attention layers",
    "recurrent_gemma": "",  # by its layers or by its calls, as transformers describes it
    "xglm": "implements attention or a state itself",
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_with_other_state_than_keys_and_values_are_refused(family, tmp_path):
    folder = save_tiny_model(family, tmp_path)
    with pytest.raises(UnsupportedModelError) as refusal:
        load(worker_config(folder))
    assert_names_type_reason_and_way_out(refusal.value, family, REASONS[family])


def test_code_that_uses_the_weights_of_linears_past_them_is_refused(tiny_model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def by_itself(self, x):
        return self.down_proj(torch.nn.functional.linear(x, self.up_proj.weight.type(x.dtype)))

    monkeypatch.setattr(LlamaMLP, "forward", by_itself)
    with pytest.raises(UnsupportedModelError) as refusal:
        load(worker_config(tiny_model("llama"), executor="hf"))
    assert_names_type_reason_and_way_out(refusal.value, "llama", "values of a linear's weight are used past the linear")


def test_code_that_asks_for_the_type_of_a_weight_and_views_its_attention_is_served(tiny_model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def asking(self, x):
        assert self.up_proj.weight.dtype == x.dtype
        assert self.up_proj.weight.shape[1] == x.shape[-1]
        return plain(self, x.view(-1).view(x.shape))

    monkeypatch.setattr(LlamaMLP, "forward", asking)
    load(worker_config(tiny_model("llama"), executor="hf"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"text_config": SimpleNamespace()}, "several models"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["SomeForConditionalGeneration"]}, "not a causal language model"),
        ({"architectures": ["SomeForMaskedLM"]}, "not a causal language model"),
        ({"is_causal": False}, "not causal"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"num_kv_shared_layers": 2}, "share the keys and values"),
        ({"alibi": True}, "alibi"),
        ({"attn_config": SimpleNamespace(alibi=True)}, "alibi"),
        ({"position_bias": True}, "position bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_configs_are_refused_for_what_they_say(values, reason):
    with pytest.raises(UnsupportedModelError) as refusal:
        check_config(config(**values))
    assert_names_type_reason_and_way_out(refusal.value, "some_model", reason)


@pytest.mark.parametrize(
    "raw", [{"model_type": "unheard_of"}, {"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}]
)
def test_unknown_types_and_remote_code_are_refused(raw, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError) as refusal:
        read_config(tmp_path)
    assert_names_type_reason_and_way_out(refusal.value, raw["model_type"], "transformers cannot read its config")


def test_the_context_is_what_the_model_has_unless_less_is_asked_for():
    assert choose_max_model_len(config(), None) == 128
    assert choose_max_model_len(config(), 100) == 100
    with pytest.raises(ConfigurationError, match=r"max_model_len = 129.*128 positions.*at most 128"):
        choose_max_model_len(config(), 129)
    with pytest.raises(ConfigurationError, match="max_model_len is not set"):
        choose_max_model_len(config(max_position_embeddings=None), None)


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 32, "long_factor": [2.0], "short_factor": [1.0]}


@pytest.mark.parametrize("rope", [LONG, {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}])
def test_angles_that_depend_on_the_batch_cap_the_context(rope):
    assert choose_max_model_len(config(rope_parameters=rope), None) == 32
    with pytest.raises(UnsupportedModelError) as refusal:
        choose_max_model_len(config(rope_parameters=rope), 33)
    assert_names_type_reason_and_way_out(refusal.value, "some_model", "rotary angles depend on the longest sequence")


def test_dynamic_angles_cap_the_context_at_the_models_own_length():
    rope = {"rope_type": "dynamic", "factor": 2.0}
    assert choose_max_model_len(config(rope_parameters=rope), None) == 128
    with pytest.raises(UnsupportedModelError):
        choose_max_model_len(config(rope_parameters=rope), 129)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"), [(4, 2, 4, True), (6, 3, 3, True), (6, 2, 4, False), (12, 4, 3, False)]
)
def test_heads_are_shared_or_repeated_evenly(heads, kv_heads, size, fits):
    some = config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    if fits:
        check_heads(some, size)
        return
    with pytest.raises(UnsupportedModelError) as refusal:
        check_heads(some, size)
    assert_names_type_reason_and_way_out(refusal.value, "some_model", f"cannot be shared by {size} ranks")


def test_a_model_without_a_plan_for_its_layers_is_not_repeated_silently():
    with pytest.raises(UnsupportedModelError) as refusal:
        ParallelPlan(config(), {"lm_head": "colwise_gather_output"}, 2)
    assert_names_type_reason_and_way_out(refusal.value, "some_model", "no tensor-parallel plan")
    ParallelPlan(config(), {}, 1)


def test_an_unknown_style_is_refused():
    with pytest.raises(UnsupportedModelError) as refusal:
        ParallelPlan(config(), {"model.layers.*.mlp.up_proj": "diagonal"}, 2)
    assert_names_type_reason_and_way_out(refusal.value, "some_model", "diagonal")
    alone = ParallelPlan(config(), {"model.layers.*.mlp.up_proj": "diagonal"}, 1)
    assert alone.cut("model.layers.0.mlp.up_proj.weight", (8, 8), None) is None


def test_features_that_ranks_cannot_share_are_refused(tmp_path):
    folder = save_tiny_model("llama", tmp_path, intermediate_size=50)
    with pytest.raises(UnsupportedModelError) as refusal:
        run_ranks(4, lambda group: ModelRunner.load(worker_config(folder, 4), group, device=torch.device("cpu")))
    assert_names_type_reason_and_way_out(refusal.value, "llama", "50 features")


def test_a_plan_with_a_gap_is_found_by_a_dry_run(tiny_model, monkeypatch):
    def forward_without_sum(self: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    monkeypatch.setattr(RowParallelLinear, "forward", forward_without_sum)
    with pytest.raises(UnsupportedModelError) as refusal:
        on_ranks(worker_config(tiny_model("llama"), 2, executor="hf"), lambda leader: None)
    assert_names_type_reason_and_way_out(refusal.value, "llama", "ranks do not agree")


@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_are_no_numbers_are_named_and_not_taken_for_a_gap_in_the_plan(tmp_path, size):
    folder = save_tiny_model("llama", tmp_path)
    spoil(folder, lambda weights: weights["model.layers.1.mlp.up_proj.weight"].view(-1).__setitem__(5, float("nan")))
    with pytest.raises(UnsupportedModelError) as refusal:
        on_ranks(worker_config(folder, size), lambda leader: None)
    assert_names_type_reason_and_way_out(refusal.value, "llama", "NaN or infinite")
    if size == 1:
        assert "its weight model.layers.1.mlp.up_proj.weight" in str(refusal.value)


def test_a_model_that_overflows_in_its_dtype_is_told_so(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    spoil(folder, lambda weights: [weight.mul_(1e30) for name, weight in weights.items() if "_proj" in name])
    with pytest.raises(UnsupportedModelError) as refusal:
        on_ranks(worker_config(folder, 1), lambda leader: None)
    assert_names_type_reason_and_way_out(refusal.value, "llama", "NaN or infinite in torch.float32")


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = {name: weight.clone() for name, weight in load_file(file).items()}
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_a_model_that_mixes_tokens_outside_attention_is_refused_on_every_rank(tiny_model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x + 0.1 * x.roll(1, dims=1)))

    def load_rank(group) -> UnsupportedModelError:
        with pytest.raises(UnsupportedModelError) as refusal:
            ModelRunner.load(worker_config(tiny_model("llama"), 2, executor="hf"), group, device=torch.device("cpu"))
        return refusal.value

    leader, follower = run_ranks(2, load_rank)
    assert_names_type_reason_and_way_out(leader, "llama", "mixes tokens outside attention")
    assert_names_type_reason_and_way_out(follower, "llama", "leader's check refused it")


def test_an_attention_call_with_something_unknown_is_refused(tiny_model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention

    plain = LlamaAttention.forward

    def with_bias(self, *args, **kwargs):
        return plain(self, *args, **kwargs, position_bias=torch.zeros(1))

    monkeypatch.setattr(LlamaAttention, "forward", with_bias)
    with pytest.raises(UnsupportedModelError) as refusal:
        load(worker_config(tiny_model("llama"), executor="hf"))
    assert_names_type_reason_and_way_out(refusal.value, "llama", "called with position_bias")


def test_attention_to_what_comes_later_is_refused(tiny_model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention

    plain = LlamaAttention.__init__

    def both_ways(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.is_causal = False

    monkeypatch.setattr(LlamaAttention, "__init__", both_ways)
    with pytest.raises(UnsupportedModelError) as refusal:
        load(worker_config(tiny_model("llama"), executor="hf"))
    assert_names_type_reason_and_way_out(refusal.value, "llama", "not causal")


@pytest.mark.parametrize(("change", "reason"), [("drop", "is missing 1 weights"), ("add", "has unexpected 1 weights")])
def test_a_checkpoint_that_does_not_fill_the_model_is_refused(change, reason, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    if change == "drop":
        del weights["model.layers.0.mlp.up_proj.weight"]
    else:
        weights["model.layers.0.mlp.side_proj.weight"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError) as refusal:
        load(worker_config(folder))
    assert_names_type_reason_and_way_out(refusal.value, "llama", reason)


def test_weights_of_another_shape_are_refused(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "intermediate_size": 64}))
    with pytest.raises(UnsupportedModelError) as refusal:
        load(worker_config(folder))
    assert refusal.value.model_type == "llama"


def test_a_folder_without_a_model_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        load(worker_config(tmp_path))
    with pytest.raises(ConfigurationError, match="no such folder"):
        load(worker_config(Path(tmp_path / "elsewhere")))
