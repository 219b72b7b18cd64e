"""Vectors, scores and classes of `LLM`, with the call shape of vLLM's methods of the same names."""

import uuid
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Unpack

from holdfast.cluster.call_options import ServiceOfAll
from holdfast.cluster.offline.calls import Enqueued, PromptInput, prompt_list, requests_of
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.lora import LoRARequest, LoRARequests, lora_of_each
from holdfast.cluster.offline.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    Pooled,
    PooledRequestOutput,
    ScoringOutput,
)
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.request import GenerationRequest, truncating
from holdfast.router.requests.pooling import PooledPrompt, PoolingDesk
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.pooling import PoolingParams, PoolingTask
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import checked_prompt, is_list

Prompts = PromptInput | Sequence[PromptInput] | Sequence[int]


class PoolingOptions(ServiceOfAll, total=False):
    """Options that all methods of a pooled model have in common."""

    truncate_prompt_tokens: int | None
    """Tokens of each prompt that are kept; -1: up to the model's maximum length. Unset: longer prompts are refused."""
    truncation_side: Literal["left", "right"] | None
    """Side that is cut; unset: right, so that the first tokens are kept."""
    tokenization_kwargs: Mapping[str, Any] | None
    """The same two, and `truncation` with `max_length`, as vLLM has them."""


class PoolingMethods:
    """Methods of a model that is pooled."""

    _engine: InferenceEngine

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        lora_request: LoRARequests = None,
        priority: Priority | int | Sequence[Priority | int] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PooledRequestOutput[EmbeddingOutput]]:
        """Vectors of all prompts, in their order, of a model for embeddings.

        `truncate_prompt_tokens` keeps the first tokens of longer prompts, with -1 up to the model's maximum length, and
        with a `truncation_side` of left the last ones; other prompts that are too long are refused. There is no
        progress bar. Raises `InvalidRequestError`, also for a model that gives no vectors.
        """
        asked = (pooling_params, lora_request, priority, options)
        return self._pooled(PoolingTask.EMBED, prompts, lambda one: EmbeddingOutput(embedding=_numbers(one)), *asked)

    def classify(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        lora_request: LoRARequests = None,
        priority: Priority | int | Sequence[Priority | int] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PooledRequestOutput[ClassificationOutput]]:
        """Scores of all prompts by label, in their order, of a model for classification. Otherwise as `embed`."""
        asked = (pooling_params, lora_request, priority, options)
        return self._pooled(
            PoolingTask.CLASSIFY, prompts, lambda one: ClassificationOutput(probs=_numbers(one)), *asked
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        lora_request: LoRARequest | None = None,
        *,
        instruction: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PooledRequestOutput[ScoringOutput]]:
        """Scores of pairs: of one text with each of `data_2`, or of two lists of equal length. A model for scores gets
        both in one prompt, with `instruction` where its template has one; of one for embeddings the cosine counts.
        Otherwise as `embed`.
        """
        sampling, service = _truncation(options), _service(options)
        bare = self._engine.bare_request(sampling_params=sampling, pooling=_checked(pooling_params), **service)
        if lora_request is not None:
            bare = replace(bare, model=self._engine.model_with(*lora_of_each(lora_request, 1)))
        queries, documents = _texts("data_1", data_1), _texts("data_2", data_2)
        found = self._engine.on_router(
            lambda processor, _: PoolingDesk(processor).scores(bare, queries, documents, instruction)
        )
        each = found.prompts if len(found.prompts) == len(found.scores) else [found.prompts[0]] * len(found.scores)
        return [
            _output(number, prompt, ScoringOutput(score=score))
            for number, (prompt, score) in enumerate(zip(each, found.scores, strict=True))
        ]

    # --- inside ---

    def _pooled(
        self,
        task: PoolingTask,
        prompts: Prompts,
        outputs: Callable[[PooledPrompt], Pooled],
        params: PoolingParams | None,
        lora_request: LoRARequests,
        priority: Priority | int | Sequence[Priority | int] | None,
        options: PoolingOptions,
    ) -> list[PooledRequestOutput[Pooled]]:
        given = prompt_list(prompts)
        sampling, service = [_truncation(options)] * len(given), _service(options)
        bare = self._engine.bare_request(pooling=_checked(params), request_id=uuid.uuid4().hex)
        asked = requests_of(given, sampling, priority, service, lora_request)
        models = [self._engine.model_with(one.lora) for one in asked]

        def work(
            processor: RequestProcessor, _: DispatchHost
        ) -> Coroutine[Any, Any, list[PooledRequestOutput[Pooled]]]:
            desk = PoolingDesk(processor)
            desk.facts("", task)
            return desk.pooled(_parts(bare, asked, models), lambda number, one: _output(number, one, outputs(one)))

        return self._engine.on_router(work)


def _parts(bare: GenerationRequest, asked: Iterable[Enqueued], models: Iterable[str]) -> Iterator[GenerationRequest]:
    """A request for each prompt of a call, made when it is asked for. Most are as the one before but for the prompt."""
    part, before = bare, None
    for number, (one, model) in enumerate(zip(asked, models, strict=True)):
        if before != (one.options, model):
            part, before = replace(bare, sampling_params=one.params, model=model, **one.options), (one.options, model)
        yield part.with_prompt(checked_prompt(one.given.prompt), number)


_CUT: Final = ("truncate_prompt_tokens", "truncation_side")


def _truncation(options: PoolingOptions) -> SamplingParams:
    """Parameters that cut prompts. Raises `InvalidRequestError`, also for another argument of a tokenizer."""
    asked = {name: options.get(name) for name in _CUT}
    given = dict(options.get("tokenization_kwargs") or {})
    truncation, longest = given.pop("truncation", None), given.pop("max_length", None)
    if truncation in (True, "longest_first"):
        asked["truncate_prompt_tokens"] = -1 if longest is None else longest
    elif truncation not in (None, False, "do_not_truncate") or longest is not None:
        given["max_length" if longest is not None else "truncation"] = longest or truncation
    asked |= {name: given.pop(name) for name in _CUT if name in given}
    if given:
        limit = "must have truncate_prompt_tokens, truncation_side, or truncation with max_length, and nothing else"
        raise InvalidRequestError("tokenization_kwargs", given, limit)
    return truncating(asked["truncate_prompt_tokens"], asked["truncation_side"])  # type: ignore[arg-type]  # checked there


def _service(options: PoolingOptions) -> ServiceOfAll:
    """Raises TypeError for an option that there is not."""
    if unknown := options.keys() - PoolingOptions.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    return {name: value for name, value in options.items() if name in ServiceOfAll.__annotations__}  # type: ignore[return-value]


def _checked(params: PoolingParams | None) -> PoolingParams:
    if params is not None and not isinstance(params, PoolingParams):
        raise InvalidRequestError("pooling_params", params, "must be PoolingParams")
    return params or PoolingParams()


def _texts(name: str, given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not is_list(texts) or not all(isinstance(one, str) for one in texts):
        raise InvalidRequestError(name, given, "must be a text, or a list of texts")
    return [str(one) for one in texts]


def _numbers(prompt: PooledPrompt) -> list[float]:
    return array("f", prompt.values).tolist()


def _output(number: int, prompt: PooledPrompt, outputs: Pooled) -> PooledRequestOutput[Pooled]:
    return PooledRequestOutput(
        request_id=str(number),
        outputs=outputs,
        prompt_token_ids=list(prompt.token_ids),
        num_cached_tokens=prompt.num_cached_tokens,
    )
