"""Callers of a replica in this process: they submit requests and wait for what becomes of them."""

import threading
import time
from collections.abc import Callable, Sequence

from benchmarks.gpu.load import Wish
from holdfast.worker.errors import HoldfastError
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate

LIMIT_S = 540.0
"""For one load: commands take less than ten minutes."""


class Callers:
    """A listener of a replica's engine that many requests share."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._news = threading.Condition()
        self._submitted = 0
        self._open: set[object] = set()
        self._errors: list[str] = []
        self.num_tokens = 0
        self.failure: HoldfastError | None = None
        replica.engine.attach(self)

    def submit(self, wishes: Sequence[Wish]) -> None:
        """Greedy requests that end with their last token alone."""
        for wish in wishes:
            self._submitted += 1
            name = f"request-{self._submitted}"
            self._open.add(name)
            params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=wish.num_tokens)
            request = EngineRequest(request_id=name, prompt_token_ids=wish.prompt, sampling_params=params)
            self._replica.engine.submit(request, self)

    def run(self, wishes: Sequence[Wish]) -> float:
        """Seconds from the first submission to the last token. Raises RuntimeError if any request was not served."""
        started_s = time.perf_counter()
        self.submit(wishes)
        self.wait(lambda: not self._open or self.failure is not None)
        took_s = time.perf_counter() - started_s
        if self._errors or self.failure is not None:
            raise RuntimeError(f"not served: {self._errors[:3]} {self.failure}")
        return took_s

    def wait(self, until: Callable[[], bool]) -> None:
        """Returns once `until()` holds. Raises TimeoutError after `LIMIT_S`."""
        with self._news:
            if not self._news.wait_for(until, LIMIT_S):
                raise TimeoutError(f"{len(self._open)} requests were not answered in {LIMIT_S:.0f} s")

    def on_update(self, update: StepUpdate) -> None:
        with self._news:
            for delta in update.deltas:
                self.num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._open.discard(delta.attempt)
            for rejection in update.rejections:
                self._errors.append(str(rejection.error))
                self._open.discard(rejection.attempt)
            self._news.notify_all()

    def on_failure(self, error: HoldfastError) -> None:
        with self._news:
            self.failure = error
            self._news.notify_all()
