"""Offline inference: `LLM(model).generate(prompts)`, with the call shape of vLLM's class of the same name.

A thin face on `InferenceEngine`: one process, no Ray, child processes for the other ranks of a tensor-parallel group.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from holdfast.cluster.call_options import ServiceOfAll
from holdfast.cluster.config.chat_templates import template_text
from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import keyword_layer
from holdfast.cluster.offline.calls import (
    CallRequests,
    ChatShape,
    Enqueued,
    Given,
    PromptInput,
    chat_list,
    check_unused,
    either_prompts,
    outputs_of,
    prompt_list,
    requests_of,
    run_together,
    takes_arguments_of,
)
from holdfast.cluster.offline.chat_tokenizer import ChatTokenizer
from holdfast.cluster.offline.engine_args import WHERE, translated
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.lora import LoRARequests
from holdfast.cluster.offline.outputs import BeamSearchOutput, BeamSearchParams, RequestOutput
from holdfast.cluster.offline.pooling_methods import PoolingMethods
from holdfast.cluster.offline.request_handle import RequestHandle, beam_sequence
from holdfast.cluster.offline.vllm_methods import Metric, VllmMethods, default_params, metrics_of
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import EngineStats
from holdfast.worker.value_types import is_list

if TYPE_CHECKING:
    from torch import Tensor

    from holdfast.cluster.offline.vllm_engines import EngineArgs

Message = Mapping[str, Any]
"""One turn of a chat: `role` and `content`, as OpenAI's clients send them."""

Item = TypeVar("Item")


class LLM(PoolingMethods, VllmMethods):
    """A loaded model. Close it, or use it as a context manager, to free its memory and ranks before the process ends.

    `settings` are the settings of `holdfast config show` by their last name (`max_num_seqs=8`), or the arguments of
    vLLM's class: arguments that change no output are accepted, the others are applied or refused. Requests without a
    seed get one derived from `seed` and their number, so that a script gives the same outputs every time it is run.
    `chat_template` (a file, or the template itself) takes the place of the model's own. `generation_config` (`auto`:
    the model's; `vllm`: none; or a folder) and `override_generation_config` set the default sampling parameters. Raises
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
        chat_template: str | Path | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, object] | None = None,
        **settings: object,
    ) -> None:
        named = {"model": model, "tensor_parallel_size": tensor_parallel_size, "dtype": dtype, "seed": seed}
        if max_model_len is not None:
            settings["max_model_len"] = max_model_len
        if chat_template is not None:
            settings["chat_template"] = str(chat_template)
        config = load_config(keyword_layer(HoldfastConfig, named | translated(settings), WHERE)).config
        self._generation_config = generation_config, override_generation_config or {}
        self._window = config.scheduler.max_num_waiting
        self._engine = InferenceEngine(config=config.worker, limits=config.limits, seed=seed)
        self._engine.start()
        self._enqueued: list[Enqueued] = []
        self._num_enqueued = 0
        self._close = weakref.finalize(self, self._engine.stop)

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> Self:
        """Loads a model with arguments kept as one value, such as those of a command line."""
        return cls(**engine_args.arguments())

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput] | Sequence[int] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        lora_request: LoRARequests = None,
        priority: Priority | int | Sequence[Priority | int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
        **service: Unpack[ServiceOfAll],
    ) -> list[RequestOutput]:
        """Completes all prompts together; outputs come in the order of the prompts.

        One prompt may be given without a list. `sampling_params` and `priority` are one for all, or one for each;
        without parameters, `get_default_sampling_params` holds. A whole number as `priority` is vLLM's: 0 is normal,
        lower ones go first. `use_tqdm` shows a progress bar if stderr is a terminal. `service` holds for each request,
        `timeout_s` from when it is submitted: the first that runs out of time ends the call with a
        `DeadlineExceededError`. With `enable_lora=True`, `lora_request` is the adapter of all prompts, or one for each.
        Raises `InvalidRequestError` for a prompt that can never fit, or an adapter that is refused.
        """
        if mm_processor_kwargs or tokenization_kwargs:
            check_unused(mm_processor_kwargs=mm_processor_kwargs, tokenization_kwargs=tokenization_kwargs)
        if prompts is None or prompt_token_ids is not None:
            prompts = either_prompts(prompts, prompt_token_ids)
        return self._run(self._requests(prompts, sampling_params, priority, service, lora_request, show=bool(use_tqdm)))

    def enqueue(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: Priority | int | Sequence[Priority | int] | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
        **service: Unpack[ServiceOfAll],
    ) -> list[str]:
        """Queues prompts for `wait_for_completion`, which runs them. Returns their request ids. Arguments as for
        `generate`.
        """
        if mm_processor_kwargs or tokenization_kwargs:
            check_unused(mm_processor_kwargs=mm_processor_kwargs, tokenization_kwargs=tokenization_kwargs)
        return self._enqueue(self._requests(prompts, sampling_params, priority, service, lora_request))

    def wait_for_completion(
        self, output_type: type[RequestOutput] | None = None, *, use_tqdm: bool | Callable[..., object] = True
    ) -> list[RequestOutput]:
        """Runs all enqueued requests, and returns the outputs in their order. If one request fails, so do all."""
        if output_type not in (None, RequestOutput):
            raise InvalidRequestError("output_type", output_type, "must be RequestOutput, or None")
        enqueued, self._enqueued = self._enqueued, []
        return outputs_of(enqueued, run_together(self._engine, enqueued, self._window, show=bool(use_tqdm)))

    def _chat_requests(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        lora_request: LoRARequests = None,
        priority: Priority | int | Sequence[Priority | int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
        **service: Unpack[ServiceOfAll],
    ) -> CallRequests:
        check_unused(mm_processor_kwargs=mm_processor_kwargs, tokenization_kwargs=tokenization_kwargs)
        given = self._chats(
            messages,
            chat_template_content_format,
            template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs or {},
        )
        params = self._params(sampling_params, len(given))
        return CallRequests(requests_of(given, params, priority, service, lora_request), bool(use_tqdm))

    @takes_arguments_of(_chat_requests)
    def chat(self, requests: CallRequests) -> list[RequestOutput]:
        """The assistant's next turn in one conversation, or in each of several, by the model's chat template.

        The content of a message is text, or a list of texts in OpenAI's shape, which templates get as one text.
        `tools` are shown to the model; its calls are in the text as it writes them. Otherwise as `generate`.
        """
        return self._run(requests)

    @takes_arguments_of(_chat_requests)
    def enqueue_chat(self, requests: CallRequests) -> list[str]:
        """Same as `enqueue`, for the arguments of `chat`."""
        return self._enqueue(requests)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        **service: Unpack[ServiceOfAll],
    ) -> list[BeamSearchOutput]:
        """Beam search: the likeliest continuations of each prompt, best first. Slow: one request for every beam and
        token, most of whose prompt comes from the prefix cache. `service` as for `generate`: `timeout_s` holds for the
        search of each prompt.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError("params", params, "must be BeamSearchParams")
        requests = self._requests(prompts, params.sampling_params(), None, service).requests
        handles = run_together(self._engine, requests, self._window, show=False)
        return [self._beams(handle, keep_end=params.include_stop_str_in_output) for handle in handles]

    def get_tokenizer(self) -> ChatTokenizer:
        """Encodes and decodes, and renders chats by `apply_chat_template`."""
        return ChatTokenizer.of(self._engine.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of a request that gives none: from the model's generation_config.json, else neutral ones."""
        source, overrides = self._generation_config
        return default_params(Path(self._engine.model_config.model), source, overrides)

    def update_weights(
        self,
        weights: "str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]",
        version: str = "",
        *,
        running: Literal["finish", "replay"] = "finish",
    ) -> str:
        """Same as `InferenceEngine.update_weights`."""
        return self._engine.update_weights(weights, version, running=running)

    def get_metrics(self) -> list[Metric]:
        """The engine's counts by vLLM's names. `get_stats` has all counts."""
        return metrics_of(self.get_stats(), self._engine.info.model)

    @property
    def llm_engine(self) -> InferenceEngine:
        """The same as `engine`, by vLLM's name."""
        return self._engine

    @property
    def engine(self) -> InferenceEngine:
        """The engine, for single requests, callbacks and statistics."""
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
                beam_sequence(beam, candidates, prompt_token_ids, self._engine.tokenizer, keep_end=keep_end)
                for beam, candidates in handle.beams
            ]
        )

    def _chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        content_format: str,
        **shape: Unpack[ChatShape],
    ) -> list[Given]:
        if content_format not in ("auto", "string"):
            limit = "must be auto or string: templates get contents as text"
            raise InvalidRequestError("chat_template_content_format", content_format, limit)
        shape["template"] = self._template(shape.get("template"))
        return chat_list(self._engine.tokenizer, messages, **shape)

    def _template(self, chat_template: str | None) -> str | None:
        """A template, out of a file where one is named, or the name of one of the model's own."""
        is_name = chat_template is None or chat_template in self._engine.tokenizer.chat_templates
        return chat_template if is_name else template_text(str(chat_template))

    def _params(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        """One for each prompt."""
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if not is_list(given) or not all(isinstance(one, SamplingParams) for one in given):
            limit = "must be SamplingParams, or a list with one for each prompt"
            raise InvalidRequestError("sampling_params", given, limit)
        if len(given) != num_prompts:
            raise InvalidRequestError("sampling_params", len(given), f"must be one, or {num_prompts} of them")
        return list(given)  # type: ignore[arg-type]  # each of them was looked at

    def _requests(
        self,
        prompts: PromptInput | Sequence[PromptInput] | Sequence[int],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Priority | int | Sequence[Priority | int] | None,
        service: ServiceOfAll,
        lora_request: LoRARequests = None,
        *,
        show: bool = False,
    ) -> CallRequests:
        given = prompt_list(prompts)
        params = self._params(sampling_params, len(given))
        return CallRequests(requests_of(given, params, priority, service, lora_request), show)

    def _run(self, requests: CallRequests) -> list[RequestOutput]:
        each, show = requests
        return outputs_of(each, run_together(self._engine, each, self._window, show=show))

    def _enqueue(self, requests: CallRequests) -> list[str]:
        names = [f"enqueued-{number}" for number, _ in enumerate(requests.requests, start=self._num_enqueued)]
        self._num_enqueued += len(names)
        self._enqueued += [one._replace(request_id=name) for one, name in zip(requests.requests, names, strict=True)]
        return names
