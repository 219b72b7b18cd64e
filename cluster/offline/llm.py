"""Offline inference: `LLM(model).generate(prompts)`, with the call shape of vLLM's class of the same name.

A thin face on `InferenceEngine`: one process, no Ray, child processes for the other ranks of a tensor-parallel group.
What may not live here: anything that single requests through `InferenceEngine` would lack.
"""

import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import nullcontext
from itertools import accumulate
from typing import TypeVar, Unpack

from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import keyword_layer
from holdfast.cluster.offline.beams import BeamSearchParams, beam_sequence
from holdfast.cluster.offline.inference_engine import InferenceEngine, Prompt, RequestHandle
from holdfast.cluster.offline.outputs import BeamSearchOutput, RequestOutput
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.service_options import ServiceOptions
from holdfast.router.text.chat import render_chat
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.stats import EngineStats
from holdfast.worker.value_types import checked_prompt, checked_text, checked_token_ids, is_list, is_whole

PromptInput = str | Mapping[str, object]
"""Text, or a mapping with `prompt` (text) or `prompt_token_ids` (integers)."""

Message = Mapping[str, str]
"""One turn of a chat: `role` and `content`."""

Item = TypeVar("Item")


class LLM:
    """A loaded model. Close it, or use it as a context manager, to free what it holds before the process ends.

    `settings` are those of `holdfast config show`, by their last name (`max_num_seqs=8`). Requests without a seed get
    one derived from `seed` and their number, so that a script gives the same outputs every time it is run. Raises
    `ConfigurationError` or `UnsupportedModelError` where the model cannot be loaded as asked.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        **settings: object,
    ) -> None:
        named = {"model": model, "tensor_parallel_size": tensor_parallel_size, "dtype": dtype, "seed": seed}
        if max_model_len is not None:
            settings["max_model_len"] = max_model_len
        config = load_config(keyword_layer(HoldfastConfig, named | settings, "LLM(...)")).config
        self._window = config.scheduler.max_num_waiting
        self._engine = InferenceEngine(config=config.worker, limits=config.limits, seed=seed)
        self._engine.start()
        self._close = weakref.finalize(self, self._engine.stop)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput] | Sequence[int],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **service: Unpack[ServiceOptions],
    ) -> list[RequestOutput]:
        """Completes all prompts together; outputs come in the order of the prompts.

        One prompt may be given without a list. `sampling_params` is one for all, or one for each. `use_tqdm` shows a
        progress bar if stderr is a terminal. `service` holds for each request, `timeout_s` from when it is submitted:
        the first that runs out of time ends the call with a `DeadlineExceededError`. Raises `InvalidRequestError` for a
        prompt that can never fit.
        """
        chosen = [_prompt(item) for item in _prompt_list(prompts)]
        handles = self._run(chosen, _one_each(sampling_params, len(chosen)), use_tqdm, service)
        return [handle.result() for handle in handles]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **service: Unpack[ServiceOptions],
    ) -> list[RequestOutput]:
        """The assistant's next turn in one conversation, or in each of several, by the model's own chat template."""
        is_one = not is_list(messages) or not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        prompts: list[Prompt] = [chat_token_ids(self.get_tokenizer(), talk) for talk in conversations]  # type: ignore[arg-type]
        handles = self._run(prompts, _one_each(sampling_params, len(prompts)), use_tqdm, service)
        return [handle.result() for handle in handles]

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        **service: Unpack[ServiceOptions],
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a beam search finds, best first.

        Slow: a request for every beam and token, which the prefix cache makes small ones. `service` as for `generate`:
        `timeout_s` holds for the search of each prompt.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError("params", params, "must be BeamSearchParams")
        chosen = [_prompt(item) for item in _prompt_list(prompts)]
        handles = self._run(chosen, [params.sampling_params()] * len(chosen), False, service)
        return [self._beams(handle, keep_end=params.include_stop_str_in_output) for handle in handles]

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def engine(self) -> InferenceEngine:
        """For single requests, callbacks and statistics."""
        return self._engine

    def get_stats(self) -> EngineStats:
        """Exact counts since the start: tokens, blocks used, cached and free, evictions, preemptions, hit rate."""
        return self._engine.get_stats()

    def close(self) -> None:
        """Ends the engine and its ranks. Safe to call twice."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beams(self, handle: RequestHandle, *, keep_end: bool) -> BeamSearchOutput:
        prompt_token_ids = handle.result().prompt_token_ids
        return BeamSearchOutput(
            sequences=[
                beam_sequence(completion, prompt_token_ids, self.get_tokenizer(), keep_end=keep_end)
                for completion in handle.beams
            ]
        )

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], show: bool, service: ServiceOptions
    ) -> list[RequestHandle]:
        """Requests that have finished. Keeps as many submitted as the engine's queue takes. If one fails, so does the
        call, and none is left running.
        """
        handles: list[RequestHandle] = []
        num_done = 0
        num_ahead = list(accumulate((one.beam_width or one.num_sequences for one in params), initial=0))
        bar = progress(sys.stderr) if show and sys.stderr.isatty() else nullcontext(_silent)
        try:
            with bar as report:
                for index in range(len(prompts)):
                    while len(handles) < len(prompts) and self._has_room(num_ahead, index, len(handles)):
                        number = len(handles)
                        handles.append(self._engine.enqueue_request(prompts[number], params[number], **service))
                    handles[index].result()
                    num_done += 1
                    report("generating", num_done, len(prompts))
        finally:
            for handle in handles[num_done:]:
                handle.cancel()
            futures.wait([handle.future for handle in handles[num_done:]])
        return handles

    def _has_room(self, num_ahead: Sequence[int], first: int, last: int) -> bool:
        """Whether the queue takes the sequences of requests `first` to `last`. One request by itself may always try."""
        return first == last or num_ahead[last + 1] - num_ahead[first] <= self._window


def chat_token_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The prompt that makes the model answer. Raises `InvalidRequestError` for a model without a chat template."""
    text = render_chat(tokenizer.chat_template, messages, special_tokens=tokenizer.special_tokens)
    return tokenizer.encode(text, add_special_tokens=False)


def _prompt_list(prompts: PromptInput | Sequence[PromptInput] | Sequence[int]) -> Sequence[PromptInput]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_list(prompts):
        raise InvalidRequestError("prompts", prompts, "must be a prompt or a list of prompts")
    if prompts and is_whole(prompts[0]):
        return [{"prompt_token_ids": prompts}]
    return prompts  # type: ignore[return-value]  # a sequence of integers was taken care of


def _prompt(item: PromptInput | Sequence[int]) -> Prompt:
    """The prompt in whichever way it is given; a mapping may hold nothing else, lest it be ignored."""
    if not isinstance(item, Mapping):
        return checked_prompt(item)
    if unknown := [key for key in item if key not in ("prompt", "prompt_token_ids")]:
        raise InvalidRequestError("prompt", unknown, "must have prompt or prompt_token_ids, and nothing else")
    if (token_ids := item.get("prompt_token_ids")) is not None:
        return checked_token_ids("prompt_token_ids", token_ids)
    return checked_text("prompt", item.get("prompt"))


def _one_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if not is_list(sampling_params) or not all(isinstance(one, SamplingParams) for one in sampling_params):
        limit = "must be SamplingParams, or a list with one for each prompt"
        raise InvalidRequestError("sampling_params", sampling_params, limit)
    if len(sampling_params) != num_prompts:
        raise InvalidRequestError("sampling_params", len(sampling_params), f"must be one, or {num_prompts} of them")
    return list(sampling_params)  # type: ignore[arg-type]  # each of them was looked at


def _silent(phase: str, done: int, total: int) -> None:
    pass
