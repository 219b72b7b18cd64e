"""Pooling requests of one call: many prompts side by side, and scores of pairs of texts."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Final, NamedTuple, TypeVar

from holdfast.router.request import GenerationRequest, naming
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.pooling import PoolingFacts, PoolingParams, PoolingTask, cosine

ResultT = TypeVar("ResultT")

AT_ONCE: Final = 256
"""Prompts of one call that are open at a time."""


class PooledPrompt(NamedTuple):
    """Result of one prompt."""

    values: bytes
    """float32, little-endian."""
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    model: str
    """Name by which the request has named it."""


class PairTokens(NamedTuple):
    """Most tokens of each text of a pair, beyond which it is cut at its end; 0: all."""

    query: int = 0
    document: int = 0


ALL_TOKENS: Final = PairTokens()


class PairScores(NamedTuple):
    """Scores of pairs of texts, in their order."""

    scores: list[float]
    prompts: list[PooledPrompt]
    """All prompts that they took."""


class PoolingDesk:
    """Pooling requests at one router. Errors are raised as `HoldfastError`."""

    def __init__(self, processor: RequestProcessor) -> None:
        self._processor = processor

    def facts(self, model: str, task: PoolingTask | None = None) -> PoolingFacts:
        """Facts of a pooled model. Raises `InvalidRequestError` if it is not what `task` says."""
        status = self._processor.model(model)
        facts = status.facts.pooling
        if facts is None:
            limit = "generates text: it gives neither vectors nor scores (docs/embeddings.md)"
            raise InvalidRequestError("model", status.name, limit)
        if task is not None and facts.task is not task:
            limit = "gives scores, no vectors" if task is PoolingTask.EMBED else "gives vectors, no scores of labels"
            raise InvalidRequestError("model", status.name, limit)
        return facts

    async def pooled(
        self,
        requests: Iterable[GenerationRequest],
        read: Callable[[int, PooledPrompt], ResultT],
        time_left_s: float | None = None,
    ) -> list[ResultT]:
        """Results of all requests, in their order, as `read` makes them of a request's number and result. While some
        are computed, the next are made and the last are read. The first request that fails ends the others.
        `time_left_s`: seconds until the call's own deadline.
        """
        found: dict[int, ResultT] = {}
        numbered = iter(enumerate(requests))

        async def work(first: tuple[int, GenerationRequest]) -> None:
            for number, request in chain((first,), numbered):
                async with self._processor.open(request, time_left_s) as answer:
                    (output,) = await answer.outputs()
                    tokens = answer.request.prompt_token_ids
                    result = PooledPrompt(output.pooled, tokens, output.num_cached_tokens, answer.model)
                found[number] = read(number, result)

        tasks = [asyncio.create_task(work(first)) for first in islice(numbered, AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        return [found[number] for number in range(len(found))]

    async def each(
        self, bare: GenerationRequest, prompts: Sequence[str | tuple[int, ...]], time_left_s: float | None = None
    ) -> list[PooledPrompt]:
        """Results of prompts, as parts of one request, which `bare` is without them."""
        parts = (bare.with_prompt(prompt, at) for at, prompt in enumerate(prompts))
        return await self.pooled(parts, lambda _, one: one, time_left_s)

    async def scores(
        self,
        bare: GenerationRequest,
        queries: Sequence[str],
        documents: Sequence[str],
        instruction: str | None = None,
        time_left_s: float | None = None,
        most: PairTokens = ALL_TOKENS,
    ) -> PairScores:
        """Scores of pairs: of one query with each document, or of queries and documents of the same number. A model of
        scores gets both in one prompt; of vectors the similarity counts. `bare`: what else the requests have; `most`:
        what is kept of each text.
        """
        with naming(bare.names):
            facts = self.facts(bare.model)
            queries = await self._beginnings(bare.model, queries, most.query)
            documents = await self._beginnings(bare.model, documents, most.document)
            pairs = _pairs(queries, documents)
            if facts.task is PoolingTask.CLASSIFY:
                return await self._by_model(facts, bare, pairs, instruction, time_left_s)
        return await self._by_vectors(bare, pairs, time_left_s)

    async def _beginnings(self, model: str, texts: Sequence[str], most: int) -> Sequence[str]:
        if not most:
            return texts
        return [await self._processor.beginning(model, text, most) for text in texts]

    async def _by_model(
        self,
        facts: PoolingFacts,
        bare: GenerationRequest,
        pairs: Sequence[tuple[str, str]],
        instruction: str | None,
        time_left_s: float | None,
    ) -> PairScores:
        if facts.num_outputs != 1:
            raise InvalidRequestError(
                "model", bare.model, f"has {facts.num_outputs} labels, and scores need a model with one"
            )
        if facts.pair_template:
            texts = [facts.pair(query, document, instruction) for query, document in pairs]
            prompts = await self.each(bare, texts, time_left_s)
        elif facts.is_whole:
            parts = (replace(bare, prompt=one, second_text=two, part=at) for at, (one, two) in enumerate(pairs))
            prompts = await self.pooled(parts, lambda _, one: one, time_left_s)
        else:
            limit = "has no prompt for pairs of texts: set model.score_template, with {query} and {document}"
            raise InvalidRequestError("model", bare.model, limit)
        return PairScores([memoryview(one.values).cast("f")[0] for one in prompts], prompts)

    async def _by_vectors(
        self, bare: GenerationRequest, pairs: Sequence[tuple[str, str]], time_left_s: float | None
    ) -> PairScores:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        prompts = await self.each(replace(bare, pooling=PoolingParams()), texts, time_left_s)
        vectors: Mapping[str, bytes] = {text: one.values for text, one in zip(texts, prompts, strict=True)}
        return PairScores([cosine(vectors[query], vectors[document]) for query, document in pairs], prompts)


def _pairs(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    if len(queries) not in (1, len(documents)) or not documents:
        limit = f"must be one, or one per document: {len(documents)}"
        raise InvalidRequestError("queries", len(queries), limit)
    return list(zip([*queries] * (len(documents) // len(queries)), documents, strict=True))
