"""Draft model of speculative decoding: a second, small model on rank 0 that guesses the large model's tokens.

It has a separate cache with the same number of blocks, and every block id means the same tokens in both. It draws with
the same noise as the large model, position by position, so two distributions that are close draw the same token nearly
as often as is possible (Daliri, Musco, Suresh 2024).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.worker.config import WorkerConfig
from holdfast.worker.draws import DrawParams, draw_after
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.backend import Backend, BlockCache, load_backend
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.weights import resolve_model
from holdfast.worker.step_plan import BlockCopy, Drafting, ScheduledSequence, StepPlan, draws_of


class DraftModel:
    """A loaded draft model. Give it a cache before it guesses (`allocate_cache`)."""

    def __init__(
        self, backend: Backend, device: torch.device, *, vocab_size: int, draft_vocab_size: int, max_len: int
    ) -> None:
        """`vocab_size` is the large model's: guesses are its tokens. `max_len`: positions it knows."""
        self._backend = backend
        self._device = device
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size
        self._max_len = max_len
        self._cache: BlockCache | None = None

    @classmethod
    def load(
        cls, config: WorkerConfig, folder: Path, vocab_size: int, target: Target, pool: NativePool | None
    ) -> "DraftModel":
        """Loads the draft model that the settings name, whole, on this rank, for the large one in `folder`. `pool`: the
        large model's threads, if it has a native backend on a CPU: others would wait actively beside them.

        Raises `ConfigurationError` if the two do not share their tokens, `UnsupportedModelError` as for any model.
        """
        assert config.speculation.draft_model is not None
        has_weights = config.model.load_format != "dummy"
        draft_folder = resolve_model(config.speculation.draft_model, has_weights, setting="speculation.draft_model")
        check_same_tokens(folder, draft_folder)
        # A separate group: no token depends on the bits of a draft, so any executor will do.
        alone = _alone(config, draft_folder)
        loaded = load_backend(alone, draft_folder, SingleRank(), target.device, _silent, pool)
        if loaded.backend.state_bytes(0):
            raise ConfigurationError(
                f"speculation.draft_model = {config.speculation.draft_model!r}: {loaded.facts.model_type} keeps "
                "states, which draft models have no slots for; name a model whose layers all attend"
            )
        return cls(
            loaded.backend,
            target.device,
            vocab_size=vocab_size,
            draft_vocab_size=loaded.facts.vocab_size,
            max_len=loaded.facts.max_model_len,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of its cache, all layers together."""
        return self._backend.kv_bytes_per_token

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Gives it the large model's number of blocks."""
        self._cache = self._backend.allocate_cache(num_blocks, block_size)

    def close(self) -> None:
        """Frees the draft model's memory. No drafts can be made after it."""
        self._backend.close()

    def guess(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """The drafts of each of a plan's sequences, up to the number in its `drafting`; empty if there is none to do.

        The first forward pass reads the new tokens and guesses one token for each sequence, each further pass guesses
        one more.
        """
        if plan.block_copies:
            self._copy(plan.block_copies)
        works = [_Work(sequence, self._max_len) for sequence in plan.sequences]
        number = 0
        while passing := [work for work in works if work.has_pass(number)]:
            shares = tuple(work.share(number, self._block_size) for work in passing)
            drawn = iter(self._draw(StepPlan(step_id=plan.step_id, others=shares)))
            for work in passing:
                if work.num_drafts > number:
                    work.drafts += (next(drawn),)
            number += 1
        return tuple(work.drafts for work in works) if number else ()

    @property
    def _block_size(self) -> int:
        assert self._cache is not None, "a draft model guesses with a cache"
        return self._cache.block_size

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Makes the copies that the large model's cache is about to make: a block means the same tokens in both."""
        assert self._cache is not None
        rows = [(copy.source, copy.destination, copy.num_tokens) for copy in copies]
        with torch.inference_mode():
            self._cache.copy(*torch.tensor(rows, device=self._device).T)

    def _draw(self, plan: StepPlan) -> list[int]:
        batch = StepBatch.of(plan)
        # A token that only the large model has is some other one here, where it makes for a bad guess at worst.
        batch.token_ids = np.minimum(batch.token_ids, self._draft_vocab_size - 1)
        logits = self._backend.run(batch, with_logits=True).logits
        assert logits is not None, "it is its group's leader"
        output = HeadOutput(logits[:, : self._vocab_size], None)
        drawn = self._backend.sampler.sample(output, draws_of(plan)).token_ids
        return [max(0, token) for token in drawn]  # a guess must be some token, of a row that is not finite as well


class _Work:
    """The passes of one sequence of a plan."""

    def __init__(self, sequence: ScheduledSequence, max_len: int) -> None:
        drafting = sequence.drafting or Drafting(first_position=0, token_ids=(), num_drafts=0)
        self._sequence = sequence
        self._drafting = drafting
        self._end = drafting.first_position + len(drafting.token_ids)
        fits = self._end + drafting.num_drafts <= max_len
        self._num_passes = max(1, drafting.num_drafts) if fits and drafting.token_ids else 0
        self.num_drafts = drafting.num_drafts if fits else 0
        self.drafts: tuple[int, ...] = ()

    def has_pass(self, number: int) -> bool:
        return number < self._num_passes

    def share(self, number: int, block_size: int) -> ScheduledSequence:
        """Pass 0 reads the new tokens; pass n reads draft n - 1."""
        first = self._drafting.first_position if number == 0 else self._end + number - 1
        token_ids = self._drafting.token_ids if number == 0 else self.drafts[-1:]
        draws = number < self.num_drafts
        return ScheduledSequence(
            sequence_id=self._sequence.sequence_id,
            first_position=first,
            token_ids=token_ids,
            block_ids=self._sequence.block_ids[: -(-(first + len(token_ids)) // block_size)],
            draw=drawn_params(self._sequence, self.drafts) if draws else None,
            num_draws=1 if draws else 0,
        )


def drawn_params(sequence: ScheduledSequence, drafts: tuple[int, ...]) -> DrawParams:
    """Draw of the token after these drafts: as the model draws it, without log-probabilities."""
    assert sequence.draw is not None, "only a sequence that draws is drafted"
    draw = draw_after(sequence.draw, drafts)
    if draw.sampling.logprobs is None:
        return draw
    return replace(draw, sampling=draw.sampling.with_changes(logprobs=None, logprob_token_ids=()))


def _alone(config: WorkerConfig, folder: Path) -> WorkerConfig:
    """The settings of the draft model, on one rank."""
    executor = "hf" if config.model.executor == "hf" else "auto"
    changes = {"model": str(folder), "max_model_len": None, "executor": executor, "quantization": None}
    model = config.model.model_copy(update=changes)
    parallel = config.parallel.model_copy(update={"tensor_parallel_size": 1})
    cache = config.cache.model_copy(update={"kv_cache_dtype": "auto"})  # whatever runs it, and its cache is small
    return config.model_copy(update={"model": model, "parallel": parallel, "cache": cache})


def _silent(phase: str, done: int, total: int) -> None:
    pass


def check_same_tokens(folder: Path, draft_folder: Path) -> None:
    """Raises `ConfigurationError` unless a token id means the same text in both models, as far as can be seen."""
    ours, theirs = (_read_tokens(path / "tokenizer.json") for path in (folder, draft_folder))
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigurationError(
            f"speculation.draft_model = {str(draft_folder)!r}: its tokenizer is not that of the model in {folder}, "
            "so its tokens mean something else; choose a draft model of the same family"
        )


def _read_tokens(path: Path) -> Any:
    """The vocabulary and the added tokens of a `tokenizer.json`; None if there is none to compare."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    added = {item["id"]: item["content"] for item in content.get("added_tokens", ())}
    return content.get("model", {}).get("vocab"), added
