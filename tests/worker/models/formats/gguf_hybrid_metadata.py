"""What llama.cpp's converter writes into GGUF files of models whose layers keep states or latents, beside tensors."""

from collections.abc import Mapping
from typing import Any


class Metadata:
    """Rules of llama.cpp's converter for the metadata of one model."""

    def __init__(self, architecture: str, config: Mapping[str, Any]) -> None:
        self.architecture, self.config = architecture, config
        self.num_layers: int = config.get("num_hidden_layers") or len(config["layers_block_type"])

    @property
    def _groups(self) -> int:
        names = ("mamba_n_groups", "n_groups")
        return next(self.config[name] for name in names if name in self.config)

    def metadata(self) -> dict[str, Any]:
        config = self.config
        own = {
            "lfm2": self._of_lfm2,
            "lfm2moe": self._of_lfm2_moe,
            "granitehybrid": self._of_granite,
            "nemotron_h": self._of_nemotron,
            "nemotron_h_moe": self._of_nemotron,
            "falcon-h1": self._of_falcon,
            "mamba2": self._of_mamba2,
            "deepseek2": self._of_deepseek,
            "gemma4": self._of_gemma4,
        }
        eps = next(config[key] for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config)
        found = {
            "block_count": self.num_layers,
            "embedding_length": config["hidden_size"],
            "context_length": config.get("max_position_embeddings", 2**20),
            "attention.layer_norm_rms_epsilon": float(eps),
        }
        found |= own.get(self.architecture, self._of_qwen)()
        return {f"{self.architecture}.{key}": value for key, value in found.items()}

    def _of_heads(self, kv_layers: list[bool] | None = None) -> dict[str, Any]:
        config, kv = self.config, self.config["num_key_value_heads"]
        return {
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": kv if kv_layers is None else [kv if there else 0 for there in kv_layers],
        }

    def _of_angles(self) -> dict[str, Any]:
        return {"rope.freq_base": float(self.config["rope_parameters"]["rope_theta"])}

    def _of_gemma4(self) -> dict[str, Any]:
        config, own = self.config, self.config["per_layer_config"]
        whole = next(iter(own.values()))
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
        wide = inner * (2 if config["use_double_wide_mlp"] else 1)
        kv, rope = config["num_key_value_heads"], config["rope_parameters"]
        of_experts = {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
        return {
            **(of_experts if config["enable_moe_block"] else {}),
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": [kv if one else whole.get("num_key_value_heads", kv) for one in windows],
            "attention.key_length": whole["head_dim"],
            "attention.value_length": whole["head_dim"],
            "attention.key_length_swa": config["head_dim"],
            "attention.value_length_swa": config["head_dim"],
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": windows,
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "feed_forward_length": [inner] * (len(windows) - shared) + [wide] * shared,
            "final_logit_softcapping": float(config["final_logit_softcapping"]),
            "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        }

    def _of_lfm2(self) -> dict[str, Any]:
        config = self.config
        inner = config["intermediate_size"]
        if config["block_auto_adjust_ff_dim"]:
            unit = config["block_multiple_of"]
            inner = -(-int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // unit) * unit
        return {
            **self._of_heads([kind == "full_attention" for kind in config["layer_types"]]),
            **self._of_angles(),
            "feed_forward_length": inner,
            "shortconv.l_cache": config["conv_L_cache"],
        }

    def _of_lfm2_moe(self) -> dict[str, Any]:
        config = self.config
        return {
            **self._of_heads([kind == "full_attention" for kind in config["layer_types"]]),
            **self._of_angles(),
            "feed_forward_length": config["intermediate_size"],
            "shortconv.l_cache": config["conv_L_cache"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_gating_func": 2,
            "expert_weights_scale": float(config["routed_scaling_factor"]),
        }

    def _of_mamba(self, prefix: str, heads: int, inner: int, width: int, states: int) -> dict[str, Any]:
        return {
            "ssm.conv_kernel": width,
            "ssm.state_size": states,
            "ssm.group_count": self._groups,
            "ssm.inner_size": inner,
            "ssm.time_step_rank": heads,
        }

    def _of_hybrid_mamba(self, inner: int) -> dict[str, Any]:
        config = self.config
        return self._of_mamba("mamba_", config["mamba_n_heads"], inner, config["mamba_d_conv"], config["mamba_d_state"])

    def _of_granite(self) -> dict[str, Any]:
        config = self.config
        types = config.get("layer_types") or config["layers_block_type"]
        attends = [kind in ("full_attention", "attention") for kind in types]
        experts = config["num_local_experts"]
        of_experts = {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        }
        return {
            **self._of_heads(attends),
            **self._of_hybrid_mamba(config["mamba_expand"] * config["hidden_size"]),
            **(of_experts if experts else {}),
            "feed_forward_length": config["intermediate_size"],
            "rope.scaling.finetuned": False,
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }

    def _of_nemotron(self) -> dict[str, Any]:
        config = self.config
        types = config.get("layers_block_type") or config["layer_types"]
        heads = config["mamba_num_heads"]
        found = {
            **self._of_heads([kind in ("full_attention", "attention") for kind in types]),
            **self._of_mamba(
                "", heads, heads * config["mamba_head_dim"], config["conv_kernel"], config["ssm_state_size"]
            ),
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "feed_forward_length": [config["intermediate_size"] if kind == "mlp" else 0 for kind in types],
        }
        if self.architecture == "nemotron_h_moe":
            found |= {
                "expert_count": config["n_routed_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
                "expert_weights_scale": float(config["routed_scaling_factor"]),
                "expert_weights_norm": config["norm_topk_prob"],
                "expert_group_count": config["n_group"],
                "expert_group_used_count": config["topk_group"],
            }
        return found

    def _of_falcon(self) -> dict[str, Any]:
        config = self.config
        return {
            **self._of_heads(),
            **self._of_angles(),
            **self._of_hybrid_mamba(config["mamba_d_ssm"]),
            "feed_forward_length": config["intermediate_size"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
        }

    def _of_mamba2(self) -> dict[str, Any]:
        config = self.config
        inner = config["num_heads"] * config["head_dim"]
        return {
            **self._of_mamba("", config["num_heads"], inner, config["conv_kernel"], config["state_size"]),
            "feed_forward_length": 0,
            "attention.head_count": 0,
        }

    def _of_qwen(self) -> dict[str, Any]:
        config, rope = self.config, self.config["rope_parameters"]
        found = {
            **self._of_heads(),
            **self._of_angles(),
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
            "full_attention_interval": 4,
        }
        if self.architecture == "qwen35":
            return found | {"feed_forward_length": config["intermediate_size"]}
        return found | {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }

    def _of_deepseek(self) -> dict[str, Any]:
        config = self.config
        is_v2 = config["model_type"] == "deepseek_v2"
        dense = config.get("first_k_dense_replace")
        query = {"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}
        groups = {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
        return {
            **query,
            **self._of_angles(),
            **({} if is_v2 else groups),
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length": config["kv_lora_rank"] + config["qk_rope_head_dim"],
            "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": config["qk_rope_head_dim"],
            "feed_forward_length": config["intermediate_size"],
            "leading_dense_block_count": 1 if dense is None else dense,
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": not is_v2 and config["norm_topk_prob"],
            "expert_gating_func": 1 if is_v2 else 2,
        }
