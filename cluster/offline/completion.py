"""One request on its way through the in-process engine: its sequences, and whoever waits for them.

What may live here: the state of a single request. What may not: threads, and other requests.
"""

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from holdfast.cluster.offline.outputs import CompletionOutput, Logprob, RequestOutput
from holdfast.cluster.offline.sequence_output import SequenceOutput, by_token_id
from holdfast.router.dispatch.parallel_sampling import best, is_ranked, siblings
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineRequest, TokenDelta

logger = logging.getLogger(__name__)

Callback = Callable[[RequestOutput], None]


class Completion:
    """Grows with every delta until it ends, once, by the finish of its last sequence or by an error.

    `prompt` is the text that was given, if one was; `echo` the text that each output begins with.
    """

    def __init__(
        self,
        request: EngineRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        callback: Callback | None,
        echo: str = "",
    ) -> None:
        self.request = request
        self.engine_requests = siblings(request)
        """What the engine is asked: a request for each sequence."""
        self.future: Future[RequestOutput] = Future()
        self.future.set_running_or_notify_cancel()  # it is cancelled by aborting the request, not through the future
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._callback = callback
        self._sequences: dict[Hashable, SequenceOutput] = {
            item.request_id: SequenceOutput(item, tokenizer, echo) for item in self.engine_requests
        }

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self._sequences.values())

    @property
    def ended_ids(self) -> list[Hashable]:
        """The engine requests from which nothing more is wanted."""
        is_over = self.future.done()
        return [key for key, sequence in self._sequences.items() if is_over or sequence.is_finished]

    def take(self, delta: TokenDelta) -> None:
        """Adds what a step did for one of the sequences, and tells whoever waits."""
        self._sequences[delta.attempt].take(delta)
        self._tell()

    def fail(self, error: HoldfastError) -> None:
        """Ends the request without a finish."""
        self._call_back(self._output(error))
        self.future.set_exception(error)

    def _tell(self) -> None:
        """Of a ranked request nothing is told before the ranking is known."""
        is_secret = self._callback is None or is_ranked(self.request.sampling_params)
        if is_secret and not self.is_finished:
            return
        output = self._output()
        self._call_back(output)
        if self.is_finished:
            self.future.set_result(output)

    def _call_back(self, output: RequestOutput) -> None:
        if self._callback is None:
            return
        try:
            self._callback(output)
        except Exception:  # it is the caller's code: whatever it raises, the request goes on, and so do others
            logger.exception("the callback of request %s failed", output.request_id)

    def _output(self, error: HoldfastError | None = None) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=self._outputs(),
            finished=self.is_finished,
            num_cached_tokens=min(sequence.num_cached_tokens for sequence in self._sequences.values()),
            prompt_logprobs=self._prompt_logprobs(),
            error=error,
        )

    def _outputs(self) -> list[CompletionOutput]:
        """Those of all sequences, or of the best ones, best first."""
        params = self.request.sampling_params
        sequences = list(self._sequences.values())
        ranked = is_ranked(params)
        if ranked:
            ranking = best([sequence.token_logprobs for sequence in sequences], params.n)
            sequences = [sequences[index] for index in ranking]
        has_logprobs = params.logprobs is not None
        return [
            sequence.output(index, has_logprobs=has_logprobs, is_ranked=ranked)
            for index, sequence in enumerate(sequences)
        ]

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The first sequence has them, if they were asked for."""
        if self.request.sampling_params.prompt_logprobs is None:
            return None
        said = next(iter(self._sequences.values())).prompt_logprobs
        return [None, *(by_token_id(item, self._tokenizer) for item in said)]
