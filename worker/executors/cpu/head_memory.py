"""Memory of what the head leaves of a step: logits, and for the sampler what is largest in each block of them."""

from holdfast.worker.executors.cpu.running_step import RowMemory, RunningStep


class HeadMemory:
    """Memory of one step's logits, used again by the next."""

    def __init__(self, vocab_rows: int, vocab_size: int, num_blocks: int) -> None:
        """`vocab_rows` of this rank, which lie in `num_blocks`; `vocab_size` of all ranks."""
        self._vocab_rows, self._vocab_size, self._num_blocks = vocab_rows, vocab_size, num_blocks
        self.free()

    def free(self) -> None:
        """Gives back what the last step has used."""
        self._own, self._all, self._best, self._mass = (RowMemory() for _ in range(4))

    def ask_for_own(self, step: RunningStep) -> None:
        """Logits of this rank's part of the vocabulary."""
        step.ask_for_logits(self._own.of(step.num_drawn, self._vocab_rows))

    def ask_for_all(self, step: RunningStep) -> None:
        """Logits of all ranks, which share memory."""
        step.ask_for_all_logits(self._all.of(step.num_drawn, self._vocab_size))

    def ask_for_blocks(self, step: RunningStep, *, with_masses: bool) -> None:
        """The largest of each block of logits, on one rank, and its mass."""
        step.ask_for_block_best(self._best.of(step.num_drawn, self._num_blocks))
        if with_masses:
            step.ask_for_block_mass(self._mass.of(step.num_drawn, self._num_blocks))
