"""Arguments of `LLM` by vLLM's names: which are Holdfast's settings, which have no effect, which must be neutral.

`EngineArgs`, which holds them as a value, is in `vllm_engines.py`: a class with this many fields takes long to create.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Final

from holdfast.worker.errors import ConfigurationError

WHERE: Final = "LLM(...)"

RENAMED: Final[Mapping[str, str]] = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
}

WITHOUT_EFFECT: Final = frozenset(
    """
    enforce_eager swap_space disable_log_stats disable_log_requests enable_chunked_prefill max_seq_len_to_capture
    max_capture_size cuda_graph_sizes compilation_config cudagraph_capture_sizes max_cudagraph_capture_size
    optimization_level distributed_executor_backend worker_use_ray worker_cls worker_extension_cls
    ray_workers_use_nsight max_parallel_loading_workers disable_custom_all_reduce
    disable_nccl_for_dp_synchronization use_v2_block_manager num_lookahead_slots
    multi_step_stream_outputs preemption_mode scheduler_delay_factor scheduler_cls scheduling_policy
    max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold stream_interval
    disable_async_output_proc disable_cascade_attn disable_sliding_window_cache disable_hybrid_kv_cache_manager
    prefix_caching_hash_algo attention_backend attention_config mamba_block_size enable_expert_parallel enable_eplb
    eplb_config all2all_backend expert_placement_strategy num_redundant_experts guided_decoding_backend
    guided_decoding_disable_fallback structured_outputs_config tokenizer_pool_size tokenizer_pool_type
    tokenizer_pool_extra_config model_loader_extra_config ignore_patterns use_tqdm_on_load safetensors_load_strategy
    config_format hf_token allowed_local_media_path allowed_media_domains disable_mm_preprocessor_cache
    mm_processor_cache_gb skip_mm_profiling otlp_traces_endpoint collect_detailed_traces
    show_hidden_metrics_for_version kv_cache_metrics cudagraph_metrics profiler_config enable_sleep_mode
    fail_on_environ_validation
    safetensors_prefetch_num_threads safetensors_prefetch_block_size ir_op_priority master_addr master_port
    distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus
    dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_rank
    data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    enable_hc_sp enable_batch_sharded_sampling enable_ep_weight_filter moe_backend linear_backend
    sparse_indexer_topk_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size
    dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold prefix_cache_retention_interval
    max_num_scheduled_tokens long_prefill_token_threshold_adaptive max_num_active_seqs aggregate_engine_logging
    allow_deprecated_quantization enable_shm_tensor_arena language_model_only interleave_mm_strings
    mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    mm_encoder_fp8_scale_save_margin renderer_num_workers video_pruning_rate video_pruning_method mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize max_lora_rank fully_sharded_loras
    max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora
    enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels disable_chunked_mm_input
    scheduler_reserve_full_isl prefill_schedule_interval watermark aux_output_config reasoning_parser
    reasoning_parser_plugin per_request_spec_decode_metrics kv_cache_metrics_sample custom_histogram_buckets
    enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode
    jit_monitor_verbose enable_mm_processor_stats mamba_config kernel_config enable_flashinfer_autotune monokernel
    logging_config log_level log_config_file ec_manager_config sleep_mode_backend sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend prefix_match_unit
    mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend
    mamba_ssu_algorithm mamba_cache_philox_rounds pt_load_map_location kv_sharing_fast_prefill swa_bounded_replay
    performance_mode fault_tolerance_config enable_fault_tolerance shutdown_timeout watchdog_config
    gdn_prefill_backend kda_prefill_backend kda_decode_backend enable_log_requests
    """.split()  # noqa: SIM905  # a list has a line for each
)
"""They change how vLLM works, and no token of its outputs."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "trust_remote_code": (False,),
    "quantization_config": (None,),
    "calculate_kv_scales": (False, True),  # scales are always those of the keys and values themselves
    "cpu_offload_gb": (0,),
    "offload_group_size": (0,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto", "hf", "fast", "slow"),
    "task": ("auto", "generate"),
    "lora_modules": (None,),
    "enable_prompt_adapter": (False,),
    "enable_prompt_embeds": (False,),
    "logits_processors": (None, []),
    "logits_processor_pattern": (None,),
    "logprobs_mode": ("raw_logprobs",),
    "pooler_config": (None,),
    "override_pooler_config": (None,),
    "mm_processor_kwargs": (None, {}),
    "limit_mm_per_prompt": (None, {}),
    "enable_return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "kv_transfer_config": (None,),
    "kv_events_config": (None,),
    "additional_config": (None, {}),
    "rope_scaling": (None, {}),
    "rope_theta": (None,),
    "code_revision": (None,),
    "hf_config_path": (None,),
    "model_weights": ("",),
    "offload_backend": ("auto",),
    "cpu_offload_params": (None, set()),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "offload_params": (None, set()),
    "kv_offloading_size": (None,),
    "kv_offloading_backend": (None, "native"),
    "nnodes": (1,),
    "node_rank": (0,),
    "device_ids": (None,),
    "disable_sliding_window": (False,),
    "max_num_queued_reqs": (None,),
    "max_num_queued_tokens": (None,),
    "use_fp64_gumbel": (False,),
    "enable_trace_replay": (False,),
    "model_class_overrides": (None, {}),
    "enable_mm_embeds": (False,),
    "media_io_kwargs": (None, {}),
    "io_processor_plugin": (None,),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    "enable_mamba_cache_stochastic_rounding": (False,),
    "kv_cache_dtype_skip_layers": (None, []),
    "watermark_config": (None,),
    "diffusion_config": (None,),
    "reasoning_config": (None,),
    "engram_config": (None,),
    "ec_transfer_config": (None,),
    "weight_transfer_config": (None,),
    "default_mm_loras": (None,),
    "tokens_only": (False,),
    "model_impl": ("auto",),
}
"""Arguments that would change outputs, or ask for an unsupported feature, with the values that do not."""

REASONS: Final[Mapping[str, str]] = {
    "trust_remote_code": "code that comes with a checkpoint is never run here",
    "rope_scaling": "give it in hf_overrides, as rope_parameters",
    "rope_theta": "give it in hf_overrides, as rope_parameters",
    "logits_processors": "give logit_bias, bad_words or structured_outputs with a request",
}

SHARED: Final = frozenset(
    """
    async_scheduling block_size convert enable_lora enable_prefix_caching gpu_memory_utilization load_format
    max_logprobs max_loras max_num_batched_tokens max_num_seqs runner served_model_name
    """.split()  # noqa: SIM905
)
"""Holdfast's settings by vLLM's names, besides the ones that are arguments of `LLM`. vLLM's None is Holdfast's default.
"""

NONE_IS_DEFAULT: Final = NEUTRAL.keys() | WITHOUT_EFFECT | SHARED | RENAMED.keys()

_DRAFT_METHODS: Final = {"ngram": "ngram", "suffix": "suffix", "draft_model": "draft", "mtp": "mtp", None: "draft"}


def translated(arguments: Mapping[str, object]) -> dict[str, object]:
    """Holdfast's settings by their last name. Arguments that are not vLLM's are passed on unchanged, for
    `keyword_layer` to check.

    Raises `ConfigurationError` for what would change outputs. Warns once about all arguments without effect.
    """
    settings = {name: value for name, value in arguments.items() if value is not None or name not in NONE_IS_DEFAULT}
    settings = {RENAMED.get(name, name): value for name, value in settings.items()}
    for name in settings.keys() & NEUTRAL.keys():
        _check_neutral(name, settings.pop(name))
    ignored = sorted(settings.keys() & WITHOUT_EFFECT)
    for name in ignored:
        del settings[name]
    _take_speculation(settings, ignored)
    _take_model(settings)
    _take_kv_cache_dtype(settings)
    _take_quantization(settings, ignored)
    if ignored:
        text = f"{WHERE}: {', '.join(ignored)}: accepted for compatibility with vLLM, without effect"
        warnings.warn(text, stacklevel=3)
    return settings


def _check_neutral(name: str, value: object) -> None:
    if value in NEUTRAL[name]:
        return
    wish = " or ".join(map(repr, NEUTRAL[name]))
    reason = REASONS.get(name, "other values are not supported, and would change the outputs")
    raise ConfigurationError(f"{name} = {value!r} ({WHERE}): must be {wish}: {reason}")


def _take_model(settings: dict[str, object]) -> None:
    if callable(settings.get("hf_overrides")):
        raise ConfigurationError(f"hf_overrides ({WHERE}): must be a mapping; a function could not be sent to ranks")
    for name in ("hf_overrides", "tokenizer", "revision", "download_dir"):
        if name in settings and settings[name] is None:
            del settings[name]
    tokenizer_revision = settings.pop("tokenizer_revision", None)
    if tokenizer_revision not in (None, settings.get("revision")):
        text = f"tokenizer_revision = {tokenizer_revision!r} ({WHERE}): must be that of the model"
        raise ConfigurationError(f"{text}; give another tokenizer's folder as tokenizer")


_METHODS_OF_CHECKPOINTS: Final = (*("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "mxfp4"),)


def _take_kv_cache_dtype(settings: dict[str, object]) -> None:
    """vLLM's `fp8` is e4m3 on a GPU, and has that name too."""
    given = settings.get("kv_cache_dtype")
    if given == "fp8_e4m3":
        settings["kv_cache_dtype"] = "fp8"
    elif given is None:
        settings.pop("kv_cache_dtype", None)


def _take_quantization(settings: dict[str, object], ignored: list[str]) -> None:
    """vLLM's names of checkpoints' own methods, which a checkpoint says by itself."""
    given = settings.get("quantization")
    if given in _METHODS_OF_CHECKPOINTS:
        ignored.append(f"quantization = {given!r}")
    if given is None or given in _METHODS_OF_CHECKPOINTS:
        settings.pop("quantization", None)


def _take_speculation(settings: dict[str, object], ignored: list[str]) -> None:
    """vLLM's `speculative_config`, or its parts by their short names. A method that is not here changes no token."""
    config = settings.pop("speculative_config", None) or {}
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"speculative_config = {config!r} ({WHERE}): must be a mapping")
    short = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
    config = dict(config) | {long: value for name, long in short.items() if (value := settings.pop(name, None))}
    if not config:
        return
    method = config.pop("method", None)
    if method not in _DRAFT_METHODS:
        ignored.append(f"speculative_config (method {method!r})")
        return
    settings["speculative"] = _DRAFT_METHODS[method]
    names = {"num_speculative_tokens": "num_speculative_tokens", "model": "draft_model"}
    names |= {"prompt_lookup_min": "ngram_min", "prompt_lookup_max": "ngram_max"}
    for name, value in config.items():
        if name in names and value is not None and (name != "model" or settings["speculative"] == "draft"):
            settings[names[name]] = value
        elif value is not None:
            ignored.append(f"speculative_config.{name}")


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
    "quantization": None,
    "speculative_config": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
}
"""Arguments of `LLM` itself and of its translation, with their defaults."""

DEFAULTS: Final[dict[str, Any]] = (
    _NAMED
    | dict.fromkeys(sorted(SHARED | RENAMED.keys()))
    | {name: values[0] for name, values in NEUTRAL.items()}
    | dict.fromkeys(sorted(WITHOUT_EFFECT))
)
"""Every argument with its default; None for values that the settings determine."""
