"""Model info: facts of a loaded model, and a replica's report of itself. Plain data, no torch."""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, Self

from holdfast.worker.adapter import Adapter
from holdfast.worker.pooling import PoolingFacts

VERSION_LENGTH: Final = 8
"""Hexadecimal digits of a version."""

_ADAPTER: Final = "lora-"
_ADAPTER_DIGITS: Final = 16

TILE_TOKENS: Final = 64
"""Executors read keys in tiles of this many positions, and always the whole first tile of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Blocks of layers whose queries see the last positions alone, kept as long as a query may still read them."""

    num_tokens: int
    """A query sees itself and the `window` - 1 keys before it."""
    block_size: int
    """Tokens of such a block. It takes as much memory as a block of the other layers, whose size is a multiple or a
    divisor of this.
    """
    spacing: int
    """The larger of both block sizes: cached prefixes end at multiples of it."""

    @classmethod
    def beside(cls, block_size: int, num_tokens: int, own_block_size: int) -> "Window":
        """Beside layers that see all and have blocks of this size."""
        return cls(num_tokens=num_tokens, block_size=own_block_size, spacing=max(block_size, own_block_size))

    def first_block(self, position: int) -> int:
        """The first block that a query at this position reads; those before it are of no use to later ones either."""
        return max(0, position - self.num_tokens + 1) // TILE_TOKENS * TILE_TOKENS // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold positions 0 to `num_tokens - 1`."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Maximum number of blocks that a sequence of this many tokens needs at a time: the window of its next token or
        of a token after the last cacheable prefix, and one to continue.
        """
        of_window = (self.num_tokens + TILE_TOKENS + self.spacing) // self.block_size + 3
        return min(self.num_blocks_for(num_tokens), of_window)


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts of one loaded replica. Equal on all replicas of a model, except `num_blocks` and measurements:
    `row_invariant` and `answers_digest`.
    """

    model: str
    """The name that clients use."""
    path: str
    """The local folder, or GGUF file, that routers read the tokenizer in: the model's own, unless `model.tokenizer` is
    set.
    """
    model_type: str
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    """The tokens that end a sequence by the model's own word."""
    dtype: str
    tensor_parallel_size: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    """On one rank, all layers together; with a `window`, of the full-attention layers, including padding."""
    window_tokens: int = 0
    """Tokens that a query sees in window layers with separate blocks; 0: there are none."""
    window_block_size: int = 0
    """Likewise."""
    num_state_slots: int = 0
    """Slots for states of sequences; 0: the model keeps none."""
    state_bytes: int = 0
    """Bytes of a slot on one rank, all layers together."""
    state_blocks: int = 0
    """Number of blocks whose memory one slot occupies; 0: slots have separate memory."""
    quantization: str = "none"
    """Quantization of its weights, in words (`worker/models/checkpoint_scheme.py`)."""
    weight_bytes: int = 0
    """Memory that the weights of all ranks take; 0 where they were made up."""
    row_invariant: bool
    """The start-up check found each row's bits independent of its neighbours, on the machine at hand."""
    device: str = ""
    """The kind of device: kinds differ in their bits."""
    executor: str = ""
    """Executor of the layers, with the version of its numerics: executors differ in their bits."""
    checkpoint_digest: str = ""
    """Digest of samples of the weights; empty for random weights."""
    weights_version: str = ""
    """Version of updated weights, named by the caller who put them in place; empty for those of the start."""
    chat_template: str = ""
    """The chat template that its settings give; empty: the tokenizer's own."""
    transfers_blocks: bool = False
    """Whether its cached blocks go to other replicas of its version, and theirs come here."""
    release: str = ""
    """The release of the code that runs it."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that its settings name, by which it was started."""
    max_loras: int = 0
    """Adapters that may be resident at a time; 0: adapters are not served."""
    pooling: PoolingFacts | None = None
    """Pooling of its states, if prompts are pooled; None: it generates text."""
    answers_digest: bytes = b""
    """Digest of the answer to a fixed question, which differs where weights or arithmetic do; empty if it was not
    asked."""

    @property
    def numerics(self) -> str:
        """Everything that the bits of the output depend on besides the model's name and the number of ranks."""
        weights = (self.checkpoint_digest, self.weights_version)
        return "/".join(filter(None, (self.dtype, self.device, self.executor, *weights)))

    @property
    def version(self) -> str:
        """A digest of the inputs that an update replaces: weights, code, and the settings that a completion depends on.

        Replicas of one version give the same results, unless their machines round differently.
        """
        lengths = (self.max_model_len, self.vocab_size, sorted(self.eos_token_ids))
        pooling = () if self.pooling is None else self.pooling
        parts = (self.release, self.model_type, self.tensor_parallel_size, self.numerics, *lengths, *pooling)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:VERSION_LENGTH]

    @property
    def fingerprint(self) -> str:
        """Names all inputs of a completion except the request, and ends with the version. Equal
        fingerprints, equal tokens, if arithmetic is row-invariant.
        """
        arithmetic = "row-invariant" if self.row_invariant else "row-variant"
        measured = (self.answers_digest.hex(), arithmetic, self.version)
        return "/".join(filter(None, (self.model, f"tp{self.tensor_parallel_size}", self.numerics, *measured)))

    def block_kind(self, form: str, *more: object) -> bytes:
        """Digest (16 bytes) of all inputs of a KV block's bytes except its name: the model and its release, arithmetic
        and quantization, and the layout of its rows, `form`. `more`: further facts of the block's source that must be
        equal, such as a rank and its files for a block on a disk, or another replica's measurements.
        """
        parts = (self.model_type, self.release, self.numerics, self.quantization, self.block_size, form, *more)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

    @property
    def kv_version(self) -> str:
        """The version but for the number of ranks: replicas that share it compute the same keys and values, unless
        their machines round differently.
        """
        return self._of_one_rank.version

    def transfer_kind(self, block_size: int = 0) -> bytes:
        """Digest (16 bytes) of all inputs of keys and values except tokens, however they are cut over ranks and blocks:
        the model and its release, arithmetic and quantization, and the measurements of its replica. `block_size` where
        blocks must have as many tokens too.
        """
        return replace(self, block_size=block_size).block_kind("", self._of_one_rank.fingerprint)

    @property
    def _of_one_rank(self) -> Self:
        """The same on one rank, if a known answer tells whether that has the same bits."""
        is_known = self.row_invariant and self.answers_digest
        return replace(self, tensor_parallel_size=1) if is_known else self

    @cached_property
    def window(self) -> Window | None:
        """Window of the layers with sliding-window attention, if they have separate blocks."""
        size = self.window_block_size
        return Window.beside(self.block_size, self.window_tokens, size) if self.window_tokens and size else None

    @cached_property  # every request asks
    def max_sequence_len(self) -> int:
        """Longest sequence that one request can have here: the model's context, or all of the KV cache."""
        return min(self.max_model_len, self.most_tokens)

    @property
    def computes_whole_prompts(self) -> bool:
        """Whether one step computes all of a prompt, and nothing of it is cached."""
        return self.pooling is not None and self.pooling.is_whole

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence that the cache holds."""
        return most_tokens(self.num_blocks - self.state_blocks, self.block_size, self.window)

    @property
    def num_full_sequences(self) -> int:
        """Sequences as long as the model's context that fit the KV cache at the same time."""
        needed = sequence_blocks(self.max_model_len, self.block_size, self.window) + self.state_blocks
        return self.num_blocks // needed


@dataclass(frozen=True, kw_only=True)
class ReplicaFacts(ModelInfo):
    """Facts that a replica reports when a link comes up: its identity, and its loaded model."""

    replica_id: str
    address: str = ""
    """Address of its link, as the router reaches it; not reported."""

    @classmethod
    def of(cls, replica_id: str, info: ModelInfo) -> Self:
        return cls(replica_id=replica_id, **{item.name: getattr(info, item.name) for item in fields(ModelInfo)})


def sequence_blocks(num_tokens: int, block_size: int, window: Window | None) -> int:
    """Blocks that a sequence of this number of tokens needs, including those of sliding-window layers."""
    return -(-num_tokens // block_size) + (0 if window is None else window.most_blocks(num_tokens))


def most_tokens(num_blocks: int, block_size: int, window: Window | None) -> int:
    """Tokens of one sequence that this number of blocks holds, including blocks of sliding-window layers."""
    if window is None:
        return num_blocks * block_size
    counts = range(num_blocks + 1)
    fitting = bisect_right(counts, num_blocks, key=lambda count: count + window.most_blocks(count * block_size))
    return (fitting - 1) * block_size


def with_adapter(fingerprint: str, digest: str) -> str:
    """The fingerprint of outputs with the adapter of this digest, which also ends with the version."""
    if not digest or not fingerprint:
        return fingerprint
    base, version = without_version(fingerprint), version_of(fingerprint)
    return "/".join(filter(None, (base, f"{_ADAPTER}{digest[:_ADAPTER_DIGITS]}", version)))


def adapter_of(fingerprint: str) -> str:
    """The first digits of the adapter's digest in a fingerprint; empty without an adapter."""
    parts = [part for part in fingerprint.split("/") if part.startswith(_ADAPTER)]
    return parts[-1].removeprefix(_ADAPTER) if parts else ""


def without_version(fingerprint: str) -> str:
    """A fingerprint that says the same but for the version, of which `version_of` finds none."""
    return fingerprint.removesuffix(f"/{version}") if (version := version_of(fingerprint)) else fingerprint


def version_of(fingerprint: str) -> str:
    """The version at the end of a fingerprint; empty for one without a version."""
    last = fingerprint.rpartition("/")[2]
    is_version = len(last) == VERSION_LENGTH and not set(last) - set("0123456789abcdef")
    return last if is_version and last != fingerprint else ""
