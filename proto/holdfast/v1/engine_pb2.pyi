from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Suspicion(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUSPICION_UNSPECIFIED: _ClassVar[Suspicion]
    SUSPICION_SUSPECT: _ClassVar[Suspicion]
    SUSPICION_ON_TRIAL: _ClassVar[Suspicion]
SUSPICION_UNSPECIFIED: Suspicion
SUSPICION_SUSPECT: Suspicion
SUSPICION_ON_TRIAL: Suspicion

class LinkRequest(_message.Message):
    __slots__ = ("submit", "abort", "follow_cache", "set_log_level", "kill", "take_pins", "fetch_ahead", "keep_adapters")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_CACHE_FIELD_NUMBER: _ClassVar[int]
    SET_LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    TAKE_PINS_FIELD_NUMBER: _ClassVar[int]
    FETCH_AHEAD_FIELD_NUMBER: _ClassVar[int]
    KEEP_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    follow_cache: FollowCache
    set_log_level: SetLogLevel
    kill: Kill
    take_pins: TakePins
    fetch_ahead: Submit
    keep_adapters: KeepAdapters
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., follow_cache: _Optional[_Union[FollowCache, _Mapping]] = ..., set_log_level: _Optional[_Union[SetLogLevel, _Mapping]] = ..., kill: _Optional[_Union[Kill, _Mapping]] = ..., take_pins: _Optional[_Union[TakePins, _Mapping]] = ..., fetch_ahead: _Optional[_Union[Submit, _Mapping]] = ..., keep_adapters: _Optional[_Union[KeepAdapters, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt", "prompt_token_ids", "output_token_ids", "sampling_params", "priority", "cache_salt", "tenant", "time_left_ms", "group_id", "suspicion", "request_id", "traceparent", "cache_ttl_s", "cache_prefix_tokens", "cache_marks", "adapter", "block_source", "pooling", "second_start")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_MARKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SOURCE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    SECOND_START_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: EngineSamplingParams
    priority: int
    cache_salt: str
    tenant: str
    time_left_ms: int
    group_id: str
    suspicion: Suspicion
    request_id: str
    traceparent: str
    cache_ttl_s: int
    cache_prefix_tokens: int
    cache_marks: _containers.RepeatedCompositeFieldContainer[CacheMark]
    adapter: Adapter
    block_source: BlockSource
    pooling: PoolingParams
    second_start: int
    def __init__(self, attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[EngineSamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ..., time_left_ms: _Optional[int] = ..., group_id: _Optional[str] = ..., suspicion: _Optional[_Union[Suspicion, str]] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., cache_ttl_s: _Optional[int] = ..., cache_prefix_tokens: _Optional[int] = ..., cache_marks: _Optional[_Iterable[_Union[CacheMark, _Mapping]]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., block_source: _Optional[_Union[BlockSource, _Mapping]] = ..., pooling: _Optional[_Union[PoolingParams, _Mapping]] = ..., second_start: _Optional[int] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("dimensions", "use_activation")
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    dimensions: int
    use_activation: bool
    def __init__(self, dimensions: _Optional[int] = ..., use_activation: bool = ...) -> None: ...

class CacheMark(_message.Message):
    __slots__ = ("num_tokens", "ttl_s")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    ttl_s: int
    def __init__(self, num_tokens: _Optional[int] = ..., ttl_s: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class BlockSource(_message.Message):
    __slots__ = ("address", "num_tokens", "is_computing", "block_size", "is_leaving")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPUTING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    address: str
    num_tokens: int
    is_computing: bool
    block_size: int
    is_leaving: bool
    def __init__(self, address: _Optional[str] = ..., num_tokens: _Optional[int] = ..., is_computing: bool = ..., block_size: _Optional[int] = ..., is_leaving: bool = ...) -> None: ...

class TakePins(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class GetPinsRequest(_message.Message):
    __slots__ = ("kind",)
    KIND_FIELD_NUMBER: _ClassVar[int]
    kind: bytes
    def __init__(self, kind: _Optional[bytes] = ...) -> None: ...

class GetPinsResponse(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ...) -> None: ...

class PinnedPrefix(_message.Message):
    __slots__ = ("tenant", "ttl_ms", "hashes", "num_blocks_on_disk")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    ttl_ms: int
    hashes: bytes
    num_blocks_on_disk: int
    def __init__(self, tenant: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., hashes: _Optional[bytes] = ..., num_blocks_on_disk: _Optional[int] = ...) -> None: ...

class EndPinsRequest(_message.Message):
    __slots__ = ("tenant", "prefix")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    prefix: bytes
    def __init__(self, tenant: _Optional[str] = ..., prefix: _Optional[bytes] = ...) -> None: ...

class EndPinsResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class SendBlocksRequest(_message.Message):
    __slots__ = ("kind", "names", "lasts_ms", "as_computed", "block_size", "numbers", "own_block_size", "heads", "is_leaving")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    LASTS_MS_FIELD_NUMBER: _ClassVar[int]
    AS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    OWN_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    kind: bytes
    names: bytes
    lasts_ms: int
    as_computed: bool
    block_size: int
    numbers: str
    own_block_size: int
    heads: _containers.RepeatedCompositeFieldContainer[RankHeads]
    is_leaving: bool
    def __init__(self, kind: _Optional[bytes] = ..., names: _Optional[bytes] = ..., lasts_ms: _Optional[int] = ..., as_computed: bool = ..., block_size: _Optional[int] = ..., numbers: _Optional[str] = ..., own_block_size: _Optional[int] = ..., heads: _Optional[_Iterable[_Union[RankHeads, _Mapping]]] = ..., is_leaving: bool = ...) -> None: ...

class RankHeads(_message.Message):
    __slots__ = ("counts", "heads")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    heads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., heads: _Optional[_Iterable[int]] = ...) -> None: ...

class SendBlocksResponse(_message.Message):
    __slots__ = ("refusal", "transfer", "key", "is_encrypted", "addresses", "num_blocks", "heads")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    IS_ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    transfer: bytes
    key: bytes
    is_encrypted: bool
    addresses: _containers.RepeatedCompositeFieldContainer[RankAddress]
    num_blocks: int
    heads: _containers.RepeatedCompositeFieldContainer[RankHeads]
    def __init__(self, refusal: _Optional[str] = ..., transfer: _Optional[bytes] = ..., key: _Optional[bytes] = ..., is_encrypted: bool = ..., addresses: _Optional[_Iterable[_Union[RankAddress, _Mapping]]] = ..., num_blocks: _Optional[int] = ..., heads: _Optional[_Iterable[_Union[RankHeads, _Mapping]]] = ...) -> None: ...

class RankAddress(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class EngineSamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "logprob_token_ids", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_p: _Optional[float] = ..., min_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class FollowCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetLogLevel(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class KeepAdapters(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Kill(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ("hello", "step", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: StepUpdate
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[StepUpdate, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("progress", "expected_gap_s", "starved_s")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GAP_S_FIELD_NUMBER: _ClassVar[int]
    STARVED_S_FIELD_NUMBER: _ClassVar[int]
    progress: int
    expected_gap_s: float
    starved_s: float
    def __init__(self, progress: _Optional[int] = ..., expected_gap_s: _Optional[float] = ..., starved_s: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("replica_id", "model", "max_model_len", "vocab_size", "tensor_parallel_size", "block_size", "num_blocks", "row_invariant", "load", "answers_digest", "path", "model_type", "dtype", "device", "checkpoint_digest", "kv_bytes_per_token", "num_state_slots", "state_bytes", "state_blocks", "window_tokens", "window_block_size", "transfers_blocks", "executor", "weights_version", "chat_template", "release", "quantization", "weight_bytes", "heartbeat_ms", "frozen_after_ms", "eos_token_ids", "adapters", "pooling", "max_loras")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROW_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    model: str
    max_model_len: int
    vocab_size: int
    tensor_parallel_size: int
    block_size: int
    num_blocks: int
    row_invariant: bool
    load: Load
    answers_digest: bytes
    path: str
    model_type: str
    dtype: str
    device: str
    checkpoint_digest: str
    kv_bytes_per_token: int
    num_state_slots: int
    state_bytes: int
    state_blocks: int
    window_tokens: int
    window_block_size: int
    transfers_blocks: bool
    executor: str
    weights_version: str
    chat_template: str
    release: str
    quantization: str
    weight_bytes: int
    heartbeat_ms: int
    frozen_after_ms: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    pooling: PoolingFacts
    max_loras: int
    def __init__(self, replica_id: _Optional[str] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., row_invariant: bool = ..., load: _Optional[_Union[Load, _Mapping]] = ..., answers_digest: _Optional[bytes] = ..., path: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., checkpoint_digest: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., num_state_slots: _Optional[int] = ..., state_bytes: _Optional[int] = ..., state_blocks: _Optional[int] = ..., window_tokens: _Optional[int] = ..., window_block_size: _Optional[int] = ..., transfers_blocks: bool = ..., executor: _Optional[str] = ..., weights_version: _Optional[str] = ..., chat_template: _Optional[str] = ..., release: _Optional[str] = ..., quantization: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., frozen_after_ms: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., pooling: _Optional[_Union[PoolingFacts, _Mapping]] = ..., max_loras: _Optional[int] = ...) -> None: ...

class PoolingFacts(_message.Message):
    __slots__ = ("task", "kind", "activation", "num_outputs", "is_matryoshka", "dimensions", "labels", "prompt", "pair_template", "is_whole")
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    IS_MATRYOSHKA_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PAIR_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    task: str
    kind: str
    activation: str
    num_outputs: int
    is_matryoshka: bool
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    labels: _containers.RepeatedScalarFieldContainer[str]
    prompt: str
    pair_template: str
    is_whole: bool
    def __init__(self, task: _Optional[str] = ..., kind: _Optional[str] = ..., activation: _Optional[str] = ..., num_outputs: _Optional[int] = ..., is_matryoshka: bool = ..., dimensions: _Optional[_Iterable[int]] = ..., labels: _Optional[_Iterable[str]] = ..., prompt: _Optional[str] = ..., pair_template: _Optional[str] = ..., is_whole: bool = ...) -> None: ...

class StepUpdate(_message.Message):
    __slots__ = ("step_id", "deltas", "rejections", "load", "cache_events", "plain_attempts", "plain_token_indices", "plain_token_ids", "fetched_attempts", "fetched_tokens", "stats")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKEN_INDICES_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    load: Load
    cache_events: CacheEvents
    plain_attempts: _containers.RepeatedScalarFieldContainer[int]
    plain_token_indices: _containers.RepeatedScalarFieldContainer[int]
    plain_token_ids: _containers.RepeatedScalarFieldContainer[int]
    fetched_attempts: _containers.RepeatedScalarFieldContainer[int]
    fetched_tokens: _containers.RepeatedScalarFieldContainer[int]
    stats: EngineStats
    def __init__(self, step_id: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cache_events: _Optional[_Union[CacheEvents, _Mapping]] = ..., plain_attempts: _Optional[_Iterable[int]] = ..., plain_token_indices: _Optional[_Iterable[int]] = ..., plain_token_ids: _Optional[_Iterable[int]] = ..., fetched_attempts: _Optional[_Iterable[int]] = ..., fetched_tokens: _Optional[_Iterable[int]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("stored", "evicted")
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stored: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("attempt", "first_token_index", "token_ids", "finish_reason", "num_cached_tokens", "logprobs", "prompt_logprobs", "queued_s", "num_disk_tokens", "num_draft_tokens", "num_accepted_tokens", "pooled")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    first_token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: int
    num_cached_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[EngineTokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[EngineTokenLogprob]
    queued_s: float
    num_disk_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    pooled: bytes
    def __init__(self, attempt: _Optional[int] = ..., first_token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[EngineTokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[EngineTokenLogprob, _Mapping]]] = ..., queued_s: _Optional[float] = ..., num_disk_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class EngineTokenLogprob(_message.Message):
    __slots__ = ("logprob", "rank", "top_token_ids", "top_logprobs", "token_id")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_id: int
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., token_id: _Optional[int] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("attempt", "field", "message", "retry_after_ms", "deadline_exceeded", "is_final")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    field: str
    message: str
    retry_after_ms: int
    deadline_exceeded: bool
    is_final: bool
    def __init__(self, attempt: _Optional[int] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., deadline_exceeded: bool = ..., is_final: bool = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_waiting_tokens", "num_free_blocks", "num_total_blocks", "num_foreign_suspects")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FOREIGN_SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    num_foreign_suspects: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_foreign_suspects: _Optional[int] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("num_steps", "num_requests", "num_finished", "num_aborted", "num_tokens_generated", "num_tokens_computed", "num_tokens_recomputed", "num_prefix_query_tokens", "num_prefix_hit_tokens", "num_preemptions", "num_evictions", "num_used_blocks", "num_free_blocks", "num_cached_blocks", "num_wasted_slots", "step_time_s", "num_forked_tokens", "num_draft_tokens", "num_accepted_tokens", "num_expired", "num_total_blocks", "num_running", "num_waiting", "num_waiting_tokens", "prefill_tokens_per_s", "plan_time_s", "commit_time_s", "step_counts", "gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes", "num_used_slots", "num_cached_slots", "num_total_slots", "num_snapshot_hits", "num_snapshot_evictions", "num_disk_hit_tokens", "num_disk_losses", "num_digest_failures", "num_disk_errors", "num_disk_blocks", "disk_bytes", "disk_backlog_bytes", "num_pinned_blocks", "num_received_tokens", "num_sent_blocks", "received_bytes", "sent_bytes", "received_bytes_per_s", "received_tokens_from", "num_cut_transfers", "num_adapter_loads", "num_resident_adapters", "adapter_load_s")
    class ReceivedBytesPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ReceivedTokensFromEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WASTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FORKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_TIME_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOT_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOT_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_DIGEST_FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKENS_FROM_FIELD_NUMBER: _ClassVar[int]
    NUM_CUT_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESIDENT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_requests: int
    num_finished: int
    num_aborted: int
    num_tokens_generated: int
    num_tokens_computed: int
    num_tokens_recomputed: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_evictions: int
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_wasted_slots: int
    step_time_s: float
    num_forked_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_expired: int
    num_total_blocks: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    prefill_tokens_per_s: float
    plan_time_s: float
    commit_time_s: float
    step_counts: _containers.RepeatedScalarFieldContainer[int]
    gpu_utilization: float
    gpu_memory_used_bytes: int
    gpu_memory_total_bytes: int
    num_used_slots: int
    num_cached_slots: int
    num_total_slots: int
    num_snapshot_hits: int
    num_snapshot_evictions: int
    num_disk_hit_tokens: int
    num_disk_losses: int
    num_digest_failures: int
    num_disk_errors: int
    num_disk_blocks: int
    disk_bytes: int
    disk_backlog_bytes: int
    num_pinned_blocks: int
    num_received_tokens: int
    num_sent_blocks: int
    received_bytes: int
    sent_bytes: int
    received_bytes_per_s: _containers.ScalarMap[str, float]
    received_tokens_from: _containers.ScalarMap[str, int]
    num_cut_transfers: int
    num_adapter_loads: int
    num_resident_adapters: int
    adapter_load_s: float
    def __init__(self, num_steps: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_aborted: _Optional[int] = ..., num_tokens_generated: _Optional[int] = ..., num_tokens_computed: _Optional[int] = ..., num_tokens_recomputed: _Optional[int] = ..., num_prefix_query_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_wasted_slots: _Optional[int] = ..., step_time_s: _Optional[float] = ..., num_forked_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_expired: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., plan_time_s: _Optional[float] = ..., commit_time_s: _Optional[float] = ..., step_counts: _Optional[_Iterable[int]] = ..., gpu_utilization: _Optional[float] = ..., gpu_memory_used_bytes: _Optional[int] = ..., gpu_memory_total_bytes: _Optional[int] = ..., num_used_slots: _Optional[int] = ..., num_cached_slots: _Optional[int] = ..., num_total_slots: _Optional[int] = ..., num_snapshot_hits: _Optional[int] = ..., num_snapshot_evictions: _Optional[int] = ..., num_disk_hit_tokens: _Optional[int] = ..., num_disk_losses: _Optional[int] = ..., num_digest_failures: _Optional[int] = ..., num_disk_errors: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_backlog_bytes: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., num_received_tokens: _Optional[int] = ..., num_sent_blocks: _Optional[int] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes_per_s: _Optional[_Mapping[str, float]] = ..., received_tokens_from: _Optional[_Mapping[str, int]] = ..., num_cut_transfers: _Optional[int] = ..., num_adapter_loads: _Optional[int] = ..., num_resident_adapters: _Optional[int] = ..., adapter_load_s: _Optional[float] = ...) -> None: ...
