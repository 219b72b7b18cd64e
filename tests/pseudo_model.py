"""Pseudo-model for unit tests of schedulers and engines: the next token is a hash of the tokens before it and the seed.

`PseudoRunner` keeps its "KV cache" in real blocks and reads the whole prefix back from them before it draws, so a block
that was freed too early, shared by mistake or listed in the wrong order changes the tokens, as in a real model. The
simulator has a richer one of its own, with text, grammars and penalties (`cluster/simulate/oracle/`).
"""

import hashlib
from collections.abc import Sequence

from holdfast.worker.request import TokenLogprob
from holdfast.worker.step_plan import ScheduledSequence, StepPlan, StepResult


def pseudo_token(prefix: Sequence[int], seed: int, vocab_size: int) -> int:
    """The token after `prefix`."""
    digest = hashlib.blake2b(repr((tuple(prefix), seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % vocab_size


def pseudo_completion(
    prompt: Sequence[int], seed: int, num_tokens: int, vocab_size: int, stop: Sequence[int] = ()
) -> list[int]:
    """What a request gets from any engine that works: `num_tokens` tokens, or fewer if one of `stop` comes up."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(pseudo_token(tokens, seed, vocab_size))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def pseudo_prompt_logprobs(prompt: Sequence[int], vocab_size: int) -> list[TokenLogprob]:
    """What a request that asks for them is told of its prompt: each number a function of the tokens before it."""
    numbers = [pseudo_token(prompt[:length], 0, vocab_size) for length in range(1, len(prompt))]
    known = zip(prompt[1:], numbers, strict=True)
    return [TokenLogprob(token_id=token_id, logprob=-number, rank=1) for token_id, number in known]


class PseudoRunner:
    """A `StepRunner` over the pseudo-model."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.closed = False
        self._block_size = block_size
        self._slots = [-1] * (num_blocks * block_size)

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self._write_all(plan)
        drawn = tuple(self._draw(sequence) for sequence in plan.sequences)
        of_prompts = tuple(self._prompt_logprobs(sequence) for sequence in plan.sequences)
        return StepResult(step_id=plan.step_id, token_ids=drawn, prompt_logprobs=of_prompts if any(of_prompts) else ())

    def keep_alive(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def read_back(self, sequence: ScheduledSequence) -> list[int]:
        """What the sequence's blocks hold, up to the last token of the step."""
        end = sequence.first_position + len(sequence.token_ids)
        return [self._slots[self._slot(sequence, position)] for position in range(end)]

    def _write_all(self, plan: StepPlan) -> None:
        self._copy(plan)
        for sequence in plan.sequences:
            self._write(sequence)

    def _copy(self, plan: StepPlan) -> None:
        """Reads all sources before it writes, and leaves nothing behind the slots that are copied."""
        size = self._block_size
        moved = [self._slots[copy.source * size :][: copy.num_tokens] for copy in plan.block_copies]
        for copy, slots in zip(plan.block_copies, moved, strict=True):
            start = copy.destination * size
            self._slots[start : start + size] = slots + [-1] * (size - len(slots))

    def _write(self, sequence: ScheduledSequence) -> None:
        for offset, token_id in enumerate(sequence.token_ids):
            self._slots[self._slot(sequence, sequence.first_position + offset)] = token_id

    def _draw(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        if sequence.draw is None:
            return ()
        prefix = self.read_back(sequence)
        end = len(prefix)
        lengths = range(end - sequence.num_draws + 1, end + 1)
        return tuple(pseudo_token(prefix[:length], sequence.draw.seed, self.vocab_size) for length in lengths)

    def _prompt_logprobs(self, sequence: ScheduledSequence) -> tuple[TokenLogprob, ...]:
        params = sequence.prompt_logprobs
        if params is None:
            return ()
        start, prefix = sequence.first_position + params.first_row + 1, self.read_back(sequence)
        numbers = [pseudo_token(prefix[: start + i], 0, self.vocab_size) for i in range(len(params.token_ids))]
        known = zip(params.token_ids, numbers, strict=True)
        return tuple(TokenLogprob(token_id=token_id, logprob=-number, rank=1) for token_id, number in known)

    def _slot(self, sequence: ScheduledSequence, position: int) -> int:
        return sequence.block_ids[position // self._block_size] * self._block_size + position % self._block_size
