"""Decoder program of a rank: a recognized and proved model on an executor, in place of its Hugging Face modules.

What may live here: whether a model runs so, with the reason if it does not, and one step's way. What may not:
recognition (`recognize.py`), proofs (`proof.py`), arithmetic (`cpu/`).
"""

import logging
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.decoder.cpu.cache import SUB_PAGE, TiledCache
from holdfast.worker.decoder.cpu.executor import CpuExecutor
from holdfast.worker.decoder.cpu.library import Unavailable, load_library
from holdfast.worker.decoder.families import FAMILIES
from holdfast.worker.decoder.layout import DecoderLayout, Experts
from holdfast.worker.decoder.proof import NUM_TOKENS, Recognized, ask, check
from holdfast.worker.decoder.recognize import Unrecognized, recognize
from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.sampling.head_output import HeadOutput

logger = logging.getLogger(__name__)

NUMERICS: Final = "decoder-1"
"""The order of all additions and roundings. A change that changes any bit of any output takes the next number."""

MAX_HEAD_DIM: Final = 256
MAX_GROUP: Final = 64
"""Query heads of one KV head."""


class DecoderProgram:
    """One rank's share of a model on an executor. All ranks make the same calls."""

    numerics = NUMERICS

    def __init__(self, executor: CpuExecutor) -> None:
        self.executor = executor
        self.sampler = executor.make_sampler()
        self.progress = ProgressCounter()
        """Moves with every layer."""
        self.progress.follow(executor.layers_done)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.executor.kv_bytes_per_token

    def allocate_cache(self, num_blocks: int, block_size: int) -> TiledCache:
        """The cache that steps use. Raises ValueError where the block size does not fit."""
        return self.executor.allocate_cache(num_blocks, block_size)

    @property
    def row_invariant(self) -> bool:
        return True  # by construction

    def drop_cache(self) -> None:
        self.executor.drop_cache()

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        """One step; the same output on every rank."""
        return self.executor.run(batch, with_logits=with_logits)

    def close(self) -> None:
        self.sampler.close()
        self.executor.close()


def is_candidate(model_type: str, block_size: int) -> bool:
    """Whether `build_program` finds a program for most models of this type: all that can be told from a config."""
    return model_type in FAMILIES and block_size % SUB_PAGE == 0


def read_program(module: Any, group: TensorParallelGroup, *, max_model_len: int, block_size: int) -> Recognized | str:
    """Reads a parallelized and not yet settled Hugging Face causal LM; or says why it has no program.

    All ranks of the group call this together and come to the same answer.
    """
    layout = recognize(module, group.size)
    reason = layout.reason if isinstance(layout, Unrecognized) else _unfit(layout, block_size)
    if not all_ranks(group, reason is None):
        return reason or "another rank does not recognize its share"
    assert isinstance(layout, DecoderLayout)
    try:
        load_library()
    except Unavailable as error:
        reason = str(error)
    if not all_ranks(group, reason is None):
        return reason or "another rank has no native executor"
    answers = ask(module, layout, group, max_len=max_model_len)
    return answers if isinstance(answers, str) else Recognized(layout=layout, answers=answers)


def is_available() -> bool:
    """Whether this machine runs programs. Compiles the executor first where there is none."""
    try:
        load_library()
    except Unavailable:
        return False
    return True


def make_program(
    recognized: Recognized, group: TensorParallelGroup, *, max_model_len: int, block_size: int
) -> DecoderProgram | str:
    """Packs a model and proves its executor on this machine; or says what the executor gets wrong.

    The memory of the layout's linears is given back while they are packed: afterwards only those in files can be read.
    All ranks of the group call this together and come to the same answer. Raises `Unavailable`.
    """
    layout, num_threads = recognized.layout, torch.get_num_threads()
    executor = CpuExecutor(layout, group, max_positions=max_model_len, num_threads=num_threads, uses_up=True)
    proof = check(_Provable(executor, block_size), recognized.answers, group)
    if proof.reason is not None:
        executor.close()
        return proof.reason
    logger.info(
        "decoder program on %s: errors are %.2f of what is allowed", executor.instruction_class, proof.model_error
    )
    return DecoderProgram(executor)


def build_program(
    module: Any, group: TensorParallelGroup, *, max_model_len: int, block_size: int
) -> DecoderProgram | str:
    """`read_program` and `make_program`."""
    recognized = read_program(module, group, max_model_len=max_model_len, block_size=block_size)
    if isinstance(recognized, str):
        return recognized
    return make_program(recognized, group, max_model_len=max_model_len, block_size=block_size)


def _unfit(layout: DecoderLayout, block_size: int) -> str | None:
    """What of a layout the executor does not run."""
    if block_size % SUB_PAGE:
        return f"blocks of {block_size} tokens are no multiple of {SUB_PAGE}"
    for layer in layout.layers:
        attention = layer.attention
        if attention.head_dim > MAX_HEAD_DIM:
            return f"heads have {attention.head_dim} dimensions, and {MAX_HEAD_DIM} are the most"
        if attention.num_heads // attention.num_kv_heads > MAX_GROUP:
            return f"more than {MAX_GROUP} query heads share one KV head"
        if isinstance(layer.mlp, Experts) and _is_uneven(layer.mlp):
            return "the expert that all tokens share is cut into other slices than the others"
    return None


def _is_uneven(experts: Experts) -> bool:
    shared = experts.shared
    return shared is not None and (shared.num_slices != experts.experts[0].num_slices or shared.down.bias is not None)


def all_ranks(group: TensorParallelGroup, fine: bool) -> bool:
    """Whether all ranks are fine."""
    return bool(group.all_gather(torch.tensor([int(fine)]), dim=0).min())


class _Provable:
    """The executor as a proof asks for it: one short sequence, in a small cache of its own."""

    def __init__(self, executor: CpuExecutor, block_size: int) -> None:
        self._executor = executor
        self._num_blocks = -(-NUM_TOKENS // block_size)
        self._cache = executor.allocate_cache(self._num_blocks, block_size)

    def run_layer(self, index: int, x: Tensor) -> Tensor:
        return self._executor.run_layer(index, x, self._batch(np.zeros(len(x), dtype=np.int64)))

    def run_model(self, token_ids: Tensor) -> Tensor:
        logits = self._executor.run(self._batch(token_ids.numpy()), with_logits=True).logits
        assert logits is not None
        self._executor.free_logits()
        return logits

    def _batch(self, token_ids: np.ndarray) -> StepBatch:
        count = len(token_ids)
        return StepBatch(
            step_id=0,
            token_ids=token_ids,
            first_positions=np.zeros(1, dtype=np.int64),
            num_tokens=np.array([count]),
            num_draws=np.array([count]),
            block_ids=np.arange(self._num_blocks),
            num_blocks=np.array([self._num_blocks]),
            block_copies=np.zeros((3, 0), dtype=np.int64),
            logits_rows=np.arange(count),
        )
