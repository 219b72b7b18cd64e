"""What is known of a model once it is loaded: the facts that the other floors need. Plain data, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of one loaded replica. Equal on all replicas of a model, but for `num_blocks` and what was measured:
    `row_invariant` and `answers_digest`.
    """

    name: str
    """The name that clients use."""
    path: str
    """The local folder it was read from: the router reads the tokenizer there."""
    model_type: str
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    tensor_parallel_size: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    """On one rank, all layers together."""
    row_invariant: bool
    """The start-up check found each row's bits independent of its neighbours, on the machine at hand."""
    device: str = ""
    """The kind of device: kinds differ in their bits."""
    checkpoint_digest: str = ""
    """Of samples of the weights; empty where they were made up."""
    answers_digest: bytes = b""
    """Of the answer to a fixed question, which differs where weights or arithmetic do; empty where it was not asked."""

    @property
    def numerics(self) -> str:
        """What the bits of the output depend on besides the model's name and the number of ranks."""
        return "/".join(filter(None, (self.dtype, self.device, self.checkpoint_digest)))
