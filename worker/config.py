"""Settings of a worker: validated, frozen, nested by owner. `cluster/config/` reads them from files and environment."""

from pathlib import PurePath
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from holdfast.worker.settings import (
    DTYPE_SPELLINGS,
    MAX_RANKS,
    MAX_THREADS,
    Bytes,
    Folders,
    JsonObject,
    Names,
    Settings,
    TenantShares,
    parse_bytes,
)

Quantization = Literal["int8", "int4", "fp8"]


class ModelConfig(Settings):
    """The model and how it is loaded."""

    model: str = Field(
        "demo",
        description="a local Hugging Face folder, a GGUF file, a hub id, `demo`, the bundled model, or `smollm2`",
    )
    served_model_name: str | None = Field(
        None, description="the model's name in the API; default: the last part of `model`, without .gguf"
    )
    tokenizer: str | None = Field(None, description="folder or hub id of another tokenizer; unset: the model's own")
    chat_template: str | None = Field(
        None, description="a file with a Jinja chat template, or the template itself; unset: the model's own"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    download_dir: str | None = Field(None, description="folder for downloads; unset: the hub client's default")
    hf_overrides: JsonObject = Field(
        {}, description="entries of the model's config.json to replace, as JSON; unknown ones are refused"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="data type of the weights; auto: the checkpoint's"
    )
    quantization: Quantization | None = Field(
        None,
        description="quantize the weights of an unquantized checkpoint while they are loaded; unset: no quantization",
    )
    quantized_activations: Literal["auto", "bfloat16", "int8"] = Field(
        "auto",
        description="data type of the activations that meet quantized weights; int8: quantized, on CPUs; bfloat16: not "
        "quantized, the weights are dequantized to `dtype`; auto: int8 on CPUs where supported, unless dtype is "
        "float32",
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, for benchmarks")
    max_model_len: int | None = Field(
        None, ge=1, description="maximum tokens of prompt plus output; unset: the model's context length"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    executor: Literal["auto", "native", "hf"] = Field(
        "auto",
        description="backend that runs the layers; auto: native if it supports the model, else hf",
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto", description="task of the model: generate text, or pool (vectors or scores); auto: by the model's files"
    )
    convert: Literal["auto", "none", "embed", "classify"] = Field(
        "auto",
        description="output of a pooling model: vectors (embed) or scores (classify); auto: by the model's files",
    )
    score_template: str | None = Field(
        None,
        description="prompt template of scores, with {query} and {document}; unset: the model's own",
    )
    pooling_type: Literal["auto", "last", "mean", "cls"] = Field(
        "auto",
        description="hidden states that a pooling model pools: the last token's, the mean, the first token's (cls); "
        "auto: by the model's files, else last",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of dummy weights")
    enable_lora: bool = Field(False, description="serve LoRA adapters beside the model (docs/adapters.md)")
    lora: Folders = Field(
        default_factory=dict,
        description="LoRA adapters to load at the start, as NAME=PATH,NAME=PATH; a request selects an adapter by "
        "giving NAME as its model",
    )
    max_loras: int = Field(16, ge=1, le=1024, description="maximum adapters in memory at a time")
    pinned_loras: Names = Field(
        default=(),
        description="names of adapters in --lora, as NAME,NAME, that stay in memory: fewer than --max-loras",
    )

    @field_validator("executor", mode="before")
    @classmethod
    def _by_its_name(cls, executor: object) -> object:
        """Accepts the names that executors had before 0.1.0."""
        names: dict[object, str] = {"decoder": "native", "skeleton": "hf"}
        return names.get(executor, executor) if isinstance(executor, str) else executor

    @field_validator("dtype", mode="before")
    @classmethod
    def _as_torch_spells_it(cls, dtype: object) -> object:
        """Other spellings of the same types, and torch's own objects."""
        written = str(dtype).removeprefix("torch.")
        return DTYPE_SPELLINGS.get(written, dtype)

    @model_validator(mode="after")
    def _has_weights_to_quantize(self) -> Self:
        if self.quantization is not None and self.load_format == "dummy":
            raise ValueError(
                "quantization needs a checkpoint, and load_format = 'dummy' has random weights; unset one of them"
            )
        return self

    @model_validator(mode="after")
    def _pins_its_adapters(self) -> Self:
        if unknown := [name for name in self.pinned_loras if name not in self.lora]:
            raise ValueError(f"pinned_loras: {unknown[0]!r} must be a name in lora")
        if len(set(self.pinned_loras)) >= self.max_loras and self.pinned_loras:
            raise ValueError(
                f"pinned_loras: {len(set(self.pinned_loras))} must be fewer than max_loras, {self.max_loras}: "
                "a slot must stay for the others"
            )
        return self

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return self.enable_lora or bool(self.lora)

    @property
    def config_changes(self) -> dict[str, Any]:
        """Entries that replace those of the model's config.json. A quantized output head cannot share the embedding
        table.
        """
        return {**self.hf_overrides, **({"tie_word_embeddings": False} if self.quantization else {})}

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or PurePath(self.model).name.removesuffix(".gguf")


class ParallelConfig(Settings):
    """Parallelism of one replica."""

    tensor_parallel_size: int = Field(1, ge=1, le=MAX_RANKS, description="tensor-parallel ranks of one replica")
    num_threads: int | None = Field(
        None, ge=1, le=MAX_THREADS, description="CPU threads of each rank; unset: cores / tensor_parallel_size"
    )


MIN_OFFLOAD_BYTES: Final = 16 << 20
"""Minimum size of the disk tier; a smaller one would hold a few prompts."""

KVCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8"]


class CacheConfig(Settings):
    """The paged KV cache."""

    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="data type of keys and values; auto: the model's; bfloat16, float16 and float32 must equal the "
        "model's; int8 (CPUs) and fp8 (GPUs) take about half the memory of bfloat16 and change outputs",
    )
    block_size: int | None = Field(
        None, ge=1, description="tokens per KV block; default: 16 on a CPU (a multiple of 16), 64 on a GPU"
    )
    kv_cache_memory: Bytes | None = Field(
        None, ge=1, description="size of the KV cache of each rank, e.g. 2GiB; a CPU replica prefaults it while idle"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory that a rank may use in total"
    )
    num_blocks: int | None = Field(None, ge=1, description="KV blocks of each rank; overrides the memory settings")
    num_state_slots: int | None = Field(
        None,
        ge=2,
        description="state slots of a hybrid model (docs/state-cache.md), in separate memory; default: states and KV "
        "blocks share the cache's memory",
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV blocks of prompts with a common prefix")
    kv_offload_memory: Bytes | None = Field(
        None,
        ge=MIN_OFFLOAD_BYTES,
        description="host memory for KV blocks that a GPU evicts, of each rank, e.g. 32GiB; unset: evicted blocks are "
        "computed again",
    )
    kv_offload_disk: str | None = Field(
        None,
        description="folder and size of a disk tier for evicted KV blocks, e.g. /var/cache/holdfast,100GB; blocks stay "
        "there after the replica's end; on CPUs; unset: no disk tier",
    )
    kv_offload_key_file: str | None = Field(
        None, description="file with a key of 32 bytes that encrypts the disk tier; unset: not encrypted"
    )

    kv_transfer: bool = Field(
        True,
        description="transfer cached KV blocks between replicas of a model where that is faster than computing them; "
        "on CPUs, with the native executor",
    )
    kv_transfer_way: Literal["auto", "tcp", "nixl"] = Field(
        "auto",
        description="how blocks go between replicas; auto: shared memory on one host, TCP between hosts; tcp: always; "
        "nixl: by the package nixl, and by TCP to replicas without it",
    )

    @field_validator("kv_offload_disk")
    @classmethod
    def _has_folder_and_size(cls, given: str | None) -> str | None:
        """Raises ValueError unless it names a folder and a size."""
        if given is not None:
            folder, _, size = given.rpartition(",")
            found = parse_bytes(size) if folder and size else None
            if not isinstance(found, int):
                raise ValueError(f"{given!r} is no folder and size; write it like /var/cache/holdfast,100GB")
            if found < MIN_OFFLOAD_BYTES:
                raise ValueError(f"{given!r}: the size must be at least {MIN_OFFLOAD_BYTES >> 20}MiB")
        return given

    @model_validator(mode="after")
    def _has_a_cache_to_offload(self) -> Self:
        if self.kv_offload_disk is not None and not self.enable_prefix_caching:
            raise ValueError("kv_offload_disk keeps cached prefixes, and enable_prefix_caching is off")
        if self.kv_offload_memory is not None and not self.enable_prefix_caching:
            raise ValueError("kv_offload_memory keeps cached prefixes, and enable_prefix_caching is off")
        if self.kv_offload_memory is not None and self.kv_offload_disk is not None:
            raise ValueError("kv_offload_memory is for GPUs and kv_offload_disk for CPUs; set one of them")
        if self.kv_offload_key_file is not None and self.kv_offload_disk is None:
            raise ValueError("kv_offload_key_file encrypts what kv_offload_disk keeps, which is unset")
        return self

    @property
    def offload_folder_and_bytes(self) -> tuple[str, int] | None:
        """Folder and bytes of `kv_offload_disk`."""
        if self.kv_offload_disk is None:
            return None
        folder, _, size = self.kv_offload_disk.rpartition(",")
        found = parse_bytes(size)
        assert isinstance(found, int), "it is checked"
        return folder, found


class ServiceOrderConfig(Settings):
    """Order of service wherever requests wait: in a router for a replica, and in a replica for a slot."""

    aging_s: float = Field(30.0, gt=0, description="seconds of waiting that improve a request's priority by one class")
    tenant_shares: TenantShares = Field(
        {}, description="weights of tenants in fair sharing, e.g. gold=4,free=0.5; others have 1"
    )


ENCODER_STEP_TOKENS: Final = 1024
"""Tokens of a step of an encoder, where `scheduler.max_num_batched_tokens` is not set."""


class SchedulerConfig(ServiceOrderConfig):
    """Composition of a step's batch. The order of requests is that of `ServiceOrderConfig`."""

    policy: Literal["continuous", "memory_aware"] = Field(
        "continuous",
        description="batching policy; memory_aware: admit by estimated peak memory, with hardly any preemption",
    )
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        description="maximum tokens of one step, prefill chunks and decodes together; unset, 1024 for encoders",
    )
    max_num_seqs: int = Field(64, ge=1, description="maximum number of running sequences")
    max_num_waiting: int = Field(1024, ge=1, description="maximum number of waiting requests in one replica")
    pinned_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="maximum share of the KV blocks that one tenant may pin by `cache_ttl_s`; 0: none",
    )
    async_scheduling: bool | None = Field(
        None,
        description="plan and launch a step while the previous one runs; unset or true: on GPUs, where supported, and "
        "for encoders on one rank",
    )
    num_scheduler_steps: int = Field(
        8,
        ge=1,
        le=64,
        description="maximum decode steps per plan, used where they take at most 6 ms together and no request waits; "
        "1: one step per plan",
    )
    target_tpot_ms: float | None = Field(
        None, gt=0, description="target time per output token in ms, which limits the prefill in each step; unset: off"
    )
    auto_tune: bool = Field(
        False, description="adapt the limits of each step to the load; their settings are the maxima"
    )

    def for_whole_prompts(self) -> Self:
        """The same for an encoder: steps are larger, unless their size is set, for nobody waits for single tokens."""
        is_set = "max_num_batched_tokens" in self.model_fields_set
        return self if is_set else self.model_copy(update={"max_num_batched_tokens": ENCODER_STEP_TOKENS})


class HealthConfig(Settings):
    """Detection of replicas that make no progress or compute wrong results."""

    frozen_after_s: float = Field(
        1.0,
        gt=0,
        description="seconds without progress, while requests run, after which a replica counts as frozen; raise it "
        "for slow layers",
    )
    heartbeat_s: float = Field(0.2, gt=0, description="seconds between a busy replica's heartbeats to its routers")
    condemned_after_s: float | None = Field(
        5.0,
        ge=1,
        description="seconds after which a hanging router, or a hanging leader with its ranks, is killed; unset: never",
    )
    self_check_every_s: float = Field(
        60.0, ge=0, description="seconds between self-checks of a replica; 0: no self-checks, also not at the start"
    )

    @property
    def hangs_after_s(self) -> float | None:
        """Seconds without a heartbeat after which a process is killed; None: never."""
        return None if self.condemned_after_s is None else max(self.condemned_after_s, self.frozen_after_s)


class SpeculationConfig(Settings):
    """Speculative decoding: drafts tokens and verifies them in one step. It changes the speed, never the tokens."""

    speculative: Literal["none", "ngram", "suffix", "draft", "mtp"] = Field(
        "none",
        description="draft tokens from the sequence itself (ngram), earlier outputs too (suffix), a draft model, or "
        "the checkpoint's own next-token layer (mtp)",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=64,
        description="maximum draft tokens per sequence and step; unset: 8, or 4 with a draft model, 3 with mtp",
    )
    draft_model: str | None = Field(
        None, description="folder or hub id of the draft model; `demo-draft` is the bundled one, for `demo`"
    )
    ngram_min: int = Field(2, ge=1, le=16, description="shortest n-gram to look up, in tokens")
    ngram_max: int = Field(4, ge=1, le=16, description="longest n-gram to look up, in tokens")
    suffix_corpus_tokens: int = Field(32768, ge=0, description="tokens of earlier outputs to keep for suffix")

    @property
    def max_num_drafts(self) -> int:
        """Maximum draft tokens of one sequence in a step; 0 without speculative decoding. The defaults are lower for a
        draft model, which runs once per draft token, and for a next-token layer, which was trained to predict one.
        """
        if self.speculative == "none":
            return 0
        return self.num_speculative_tokens or {"draft": 4, "mtp": 3}.get(self.speculative, 8)

    @model_validator(mode="after")
    def _check_ngrams(self) -> "SpeculationConfig":
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min = {self.ngram_min} must be at most ngram_max, {self.ngram_max}")
        return self


class TelemetryConfig(Settings):
    """Logs and traces. Metrics are on their own ports."""

    log_format: Literal["text", "json"] = Field("text", description="lines of a cluster's logs: text, or JSON objects")
    slow_request_s: float | None = Field(
        None, gt=0, description="log requests that take longer, with the time of each phase; default: off"
    )
    otlp_endpoint: str | None = Field(
        None, description="OTLP endpoint of traces over HTTP, e.g. http://collector:4318; default: no traces"
    )
    trace_share: float = Field(
        1.0, ge=0, le=1, description="share of requests that are traced where the client sends no traceparent"
    )


class WorkerConfig(Settings):
    """Everything one replica needs to know."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    health: HealthConfig = HealthConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
