"""A scheduler, the pseudo-model's runner and what each request has got, for tests of what sequences own."""

import random

from holdfast.cluster.simulate.oracle.oracle import right_token
from holdfast.cluster.simulate.oracle.pseudo_runner import PROPOSERS, PseudoRunner
from holdfast.worker.config import SchedulerConfig, SpeculationConfig
from holdfast.worker.model_info import Window
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation

BLOCK_SIZE = 4
NUM_BLOCKS = 128


class Machine:
    """A scheduler of a model with states or windows, its runner, and what each request has got."""

    def __init__(
        self,
        num_slots: int = 0,
        *,
        window: Window | None = None,
        block_size: int = BLOCK_SIZE,
        proposer: str | None = None,
        num_blocks: int = NUM_BLOCKS,
        state_blocks: int = 0,
        **values,
    ) -> None:
        """With `state_blocks` there are as many slots as in the place of all blocks."""
        num_slots = num_blocks // state_blocks if state_blocks else num_slots
        caching, turn_ends = values.pop("prefix_caching", True), values.pop("turn_ends", ())
        config = SchedulerConfig(**{"max_num_batched_tokens": 16, "max_num_seqs": 8} | values)
        speculation = SpeculationConfig(speculative="ngram", num_speculative_tokens=3)
        self.scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=512,
            eos_token_ids=frozenset(turn_ends),
            prefix_caching=caching,
            num_state_slots=num_slots,
            state_blocks=state_blocks,
            window=window,
            drafter=Speculation(speculation, config, PROPOSERS[proposer]()) if proposer else None,
        )
        self.runner = PseudoRunner(num_blocks, block_size, num_slots, window)
        self.requests: dict[str, EngineRequest] = {}
        self.got: dict[str, bytes] = {}

    def add(self, name: str, prompt: bytes, num_tokens: int = 20, **values) -> None:
        params = SamplingParams(seed=len(self.got), max_tokens=num_tokens, ignore_eos=True)
        request = EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling_params=params, **values)
        self.requests[name], self.got[name] = request, b""
        self.scheduler.add(request)

    def step(self, max_steps: int = 1) -> bool:
        plan = self.scheduler.plan(max_steps=max_steps)
        if plan is None:
            return False
        for delta in self.scheduler.commit(plan, self.runner.run(plan)):
            self.got[str(delta.attempt)] += bytes(delta.token_ids)
        self.scheduler.check_integrity()
        return True

    def run(self, max_steps: int = 1) -> None:
        while self.step(max_steps):
            pass

    @property
    def wrong(self) -> list[str]:
        """Requests that have got other tokens than the model draws."""
        return [name for name in self.got if self.got[name] != self._right(name)]

    def _right(self, name: str) -> bytes:
        output = b""
        while len(output) < len(self.got[name]):
            output += bytes((right_token(self.requests[name], output),))
        return output


def tokens(seed: int, length: int) -> bytes:
    return bytes(random.Random(seed).choices(range(3, 60), k=length))
