"""Draft proposers of simulated replicas: the real n-gram lookup, one that is nearly always right, one that never is.

Whatever they guess, the output must be the same.
"""

from collections.abc import Callable
from typing import Final

from holdfast.cluster.simulate.oracle.oracle import right_token
from holdfast.cluster.simulate.oracle.pseudo_model import VOCAB_SIZE
from holdfast.worker.scheduler.drafters import NgramProposer
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.scheduler.speculation import Proposer


class InformedProposer:
    """Proposes what the model will draw. Every `errs_every`th guess is wrong, by one."""

    def __init__(self, errs_every: int) -> None:
        self._errs_every = errs_every
        self._num_guesses = 0

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """What the model draws next, were it not for the errors."""
        output = bytes(sequence.token_ids[sequence.num_prompt_tokens :])
        guesses: list[int] = []
        for _ in range(num_tokens):
            token_id = right_token(sequence.request, output)
            self._num_guesses += 1
            if self._num_guesses % self._errs_every == 0:
                token_id = (token_id + 1) % VOCAB_SIZE
            guesses.append(token_id)
            output += bytes((token_id,))
        return tuple(guesses)

    def forget(self, sequence: Sequence) -> None:
        """It remembers nothing of a sequence."""


PROPOSERS: Final[dict[str, Callable[[], Proposer]]] = {
    "lookup": lambda: NgramProposer(1, 3),
    "right": lambda: InformedProposer(errs_every=7),
    "wrong": lambda: InformedProposer(errs_every=1),
}
"""By name; each call makes one that remembers nothing yet."""
