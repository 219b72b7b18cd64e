"""Next-token layer of a checkpoint as a draft: one layer more, which guesses the token after the next (Qwen3.5's and
GLM's MTP).

    input = W [norm(embedding of token t + 1) | norm(final norm(hidden of token t))];  head(norm(layer(input)))

Its output takes the place of the hidden state for the token after that. It runs whole on the leading rank, with a
separate cache that has the block ids of the model's, and draws with the model's noise, as a draft model does
(`draft_model.py`). The hidden states of the model's last step are read in the next one: those of the prompt, and those
of accepted drafts, which are computed again from the model's own states. Positions whose hidden states are gone, such
as those of a cached prefix, are left out: no output token depends on the bits of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.cpu.products import PackedProduct
from holdfast.worker.executors.cpu.weight_codes import searched_codes
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.backend import Backend
from holdfast.worker.models.draft_model import drawn_params
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.formats.codes import PackedCodes
from holdfast.worker.models.formats.quantization_rule import GROUP
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight
from holdfast.worker.models.model import serving_dtype
from holdfast.worker.models.native_backend import NativeBackend
from holdfast.worker.models.quantized_activations import Kept
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.stated_config import NotStated, read_stated_config
from holdfast.worker.models.stated_layout import LayoutBuilder
from holdfast.worker.models.stated_tensors import drafting_tensors
from holdfast.worker.models.text_model import served_config
from holdfast.worker.models.weights import read_json
from holdfast.worker.step_plan import BlockCopy, ScheduledSequence, StepPlan, draws_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokenParts:
    """Parts of the layer, whole."""

    table: Tensor
    """[vocab, hidden], the model's embedding."""
    final_norm: Norm
    """Final norm of the model."""
    embedding_norm: Norm
    hidden_norm: Norm
    input: Tensor
    """[hidden, 2 hidden], of both normed inputs."""
    layout: DecoderLayout
    """One layer, with the model's head. Its embedding has no numbers."""


def read_next_token(config: ModelConfig, folder: Path) -> NextTokenParts:
    """The next-token layer of a checkpoint. Raises `ConfigurationError` if there is no usable one."""
    raw = {**served_config(read_json(folder / "config.json"), folder), **config.config_changes}
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None or family.next_token is None:
        raise _refused(config, f"model type {raw.get('model_type')} has no supported next-token (MTP) layer")
    try:
        stated = read_stated_config(raw, config.hf_overrides)
        base = family.next_token.base(stated)
        tensors = drafting_tensors(stated, folder, family, base)
        share = RankShare(stated, family, tensors, SingleRank(), serving_dtype(config, stated), Kept.NUMBERS)
        shape = (stated.hidden_size, 2 * stated.hidden_size)
        of_input = share.whole(base + family.next_token.input, shape).weights[0]
        layout, table = LayoutBuilder(share).next_token(family.next_token)
        norms = [base + family.next_token.embedding_norm, base + family.next_token.hidden_norm]
        of_all, of_embedding, of_hidden = (
            share.norm(name, shape[:1], has_bias=False) for name in (family.base + family.final_norm, *norms)
        )
    except (NotStated, UnsupportedModelError) as reason:
        raise _refused(config, str(reason)) from reason
    return NextTokenParts(
        table=share.numbers(table),
        final_norm=of_all,
        embedding_norm=of_embedding,
        hidden_norm=of_hidden,
        input=of_input,
        layout=layout,
    )


def _refused(config: ModelConfig, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"speculation.speculative = 'mtp': {config.model} has no next-token layer to draft with: {reason}; choose "
        "ngram, suffix, or draft"
    )


class NextTokenLayer:
    """The layer, loaded. Give it a cache before it guesses (`allocate_cache`)."""

    def __init__(self, parts: NextTokenParts, model: CpuExecutor, *, max_len: int, max_rows: int) -> None:
        """`model` has the head, and its group's first rank the whole of it, if it is the only one; its threads run this
        layer too: others would wait actively beside them. At most `max_rows` rows of hidden states are kept from step
        to step.
        """
        shared = model.packed.model.head if model.tensor_parallel_size == 1 else None
        is_coarse = shared is not None and shared.units.bits > 0
        own = None if is_coarse else coarse_head(parts.layout.head.weights[0])
        self._parts = parts
        self._input = PackedProduct(model.pool, parts.input, None)
        self._executor = CpuExecutor(
            parts.layout if own is None else replace(parts.layout, head=own),
            SingleRank(),
            max_positions=max_len,
            threads=model.pool,
            head=shared if own is None else None,
        )
        self._executor.keeps_hidden = True
        self._sampler = self._executor.make_sampler()
        self._model = model
        self._max_len, self._max_rows = max_len, max_rows
        self._block_size = 0
        self._kept: dict[int, tuple[int, Tensor]] = {}
        """For each sequence id, the first position of the rows [tokens, hidden] that its last step left, normed."""

    @classmethod
    def load(
        cls, config: WorkerConfig, folder: Path, backend: Backend, max_len: int, *, leads: bool
    ) -> "NextTokenLayer | None":
        """On the leading rank; None on the other ranks, whose steps keep the same number of rows. Raises
        `ConfigurationError` on all ranks alike.
        """
        if not isinstance(backend, NativeBackend) or not isinstance(backend.executor, CpuExecutor):
            raise _refused(config.model, "the native executor on CPUs alone runs it")
        parts = read_next_token(config.model, folder)
        backend.executor.keeps_hidden = True
        if not leads:
            return None
        max_rows = 2 * config.scheduler.max_num_batched_tokens
        return cls(parts, backend.executor, max_len=max_len, max_rows=max_rows)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of its cache."""
        return self._executor.kv_bytes_per_token

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Gives it the model's number of blocks."""
        self._cache = self._executor.allocate_cache(num_blocks, block_size)
        self._block_size = block_size

    def close(self) -> None:
        """Frees its memory. No drafts can be made after it."""
        self._sampler.close()
        self._executor.close()

    def take(self, plan: StepPlan) -> None:
        """Keeps the hidden states of the model's step on this plan, until the sequences' next steps."""
        rows = self._model.hidden
        start = 0
        for sequence in plan.sequences:
            end = start + len(sequence.token_ids)
            self._kept.pop(sequence.sequence_id, None)  # so that the newest are last
            normed = _normed(self._parts.final_norm, rows[start:end])
            self._kept[sequence.sequence_id] = (sequence.first_position, normed)
            start = end
        num_rows = sum(len(kept) for _, kept in self._kept.values())
        while num_rows > self._max_rows and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            num_rows -= len(self._kept.pop(oldest)[1])

    def guess(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """The drafts of each of a plan's sequences, up to the number in its `drafting`; empty if there is nothing to
        read.
        """
        if plan.block_copies:
            self._copy(plan.block_copies)
        works = [_Pairs(sequence, self._kept.get(sequence.sequence_id), self._max_len) for sequence in plan.sequences]
        passing = [work for work in works if work.token_ids]
        number = 0
        with torch.inference_mode():
            while passing:
                self._pass(plan.step_id, passing)
                number += 1
                passing = [work for work in passing if work.num_drafts > number]
        return tuple(work.drafts for work in works) if number else ()

    def _pass(self, step_id: int, works: Sequence["_Pairs"]) -> None:
        """Reads the pairs of each, and guesses a token for each sequence that wants more."""
        plan = StepPlan(step_id=step_id, others=tuple(work.share(self._block_size) for work in works))
        batch = StepBatch.of(plan)
        inputs = self._inputs(batch.token_ids.tolist(), torch.cat([work.hidden for work in works]))
        output = self._executor.run(batch, with_logits=True, inputs=inputs)
        drawing = [work for work in works if work.wants_more]
        drawn = self._sampler.sample(output, draws_of(plan)).token_ids if drawing else []
        ends = torch.tensor([len(work.token_ids) for work in works]).cumsum(0) - 1
        behind = dict(zip(map(id, works), self._executor.hidden[ends], strict=True))
        for work, token in zip(drawing, drawn, strict=True):
            work.go_on(max(0, token), _normed(self._parts.layout.norm, behind[id(work)]))

    def _inputs(self, token_ids: list[int], hidden: Tensor) -> Tensor:
        """[rows, hidden] of normed hidden states and the tokens behind them."""
        parts = self._parts
        embedded = _normed(parts.embedding_norm, parts.table[token_ids].float())
        pairs = torch.cat((embedded, _normed(parts.hidden_norm, hidden)), -1)
        return self._input(pairs).float()

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks as the model's cache does: a block means the same tokens in both."""
        rows = [(copy.source, copy.destination, copy.num_tokens) for copy in copies]
        self._cache.copy(*torch.tensor(rows).T)


class _Pairs:
    """Input of one sequence of a plan: tokens, each with the hidden state of the one before it."""

    def __init__(self, sequence: ScheduledSequence, kept: tuple[int, Tensor] | None, max_len: int) -> None:
        drafting = sequence.drafting
        self._sequence = sequence
        self.num_drafts = 0
        self.drafts: tuple[int, ...] = ()
        self.token_ids: tuple[int, ...] = ()
        if drafting is None or kept is None:
            return
        first_kept, rows = kept
        end = drafting.first_position + len(drafting.token_ids)
        first = max(drafting.first_position, first_kept + 1)
        last = min(end, first_kept + len(rows) + 1)
        if first >= last:
            return
        self._first = first - 1
        self.token_ids = drafting.token_ids[first - drafting.first_position : last - drafting.first_position]
        self.hidden = rows[first - 1 - first_kept : last - 1 - first_kept]
        fits = end + drafting.num_drafts <= max_len
        self.num_drafts = drafting.num_drafts if last == end and fits else 0

    @property
    def wants_more(self) -> bool:
        return len(self.drafts) < self.num_drafts

    def share(self, block_size: int) -> ScheduledSequence:
        """The pass that is next. A pair lies at the position of its hidden state."""
        return ScheduledSequence(
            sequence_id=self._sequence.sequence_id,
            first_position=self._first,
            token_ids=self.token_ids,
            block_ids=self._sequence.block_ids[: -(-(self._first + len(self.token_ids)) // block_size)],
            draw=drawn_params(self._sequence, self.drafts) if self.wants_more else None,
            num_draws=int(self.wants_more),
        )

    def go_on(self, token: int, hidden: Tensor) -> None:
        """Continues with a guess, and the hidden state behind the layer."""
        self._first += len(self.token_ids)
        self.drafts += (token,)
        self.token_ids, self.hidden = (token,), hidden[None]


def coarse_head(weight: Tensor) -> Linear | None:
    """A head [vocab, hidden] in 4 bits, of which a draft reads a third of the bytes; None where it is served in
    float32, or an output is no whole number of groups.
    """
    if weight.dtype == torch.float32 or weight.shape[1] % GROUP:
        return None
    words, scales = searched_codes(weight, GROUP)
    rows, columns = weight.shape
    quantized = QuantizedWeight(
        rows=(0, rows),
        columns=(0, columns),
        codes=PackedCodes(stored=words, bits=4, packed_dim=1, middle=8),
        scales=scales,
        zeros=None,
        block_rows=1,
        groups=torch.arange(columns) // GROUP,
        is_in_file=False,
    )
    return Linear(units=(quantized,))


def _normed(norm: Norm, x: Tensor) -> Tensor:
    """float32"""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
