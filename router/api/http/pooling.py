"""Endpoints of pooled models: vectors in OpenAI's shape, and scores, ranks and classes as vLLM, Jina and Cohere have
them.
"""

import base64
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response, unless_gone
from holdfast.router.api.http.bodies import Notes
from holdfast.router.api.http.json_body import Listed, Reads
from holdfast.router.api.http.request_reader import RequestReader, tenant_of
from holdfast.router.api.http.sampling import priority_of
from holdfast.router.request import FieldNames, GenerationRequest, check_inputs, naming, truncating
from holdfast.router.requests.poison_watch import expect_prompts
from holdfast.router.requests.pooling import PairTokens, PooledPrompt, PoolingDesk
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import FIELD
from holdfast.worker.pooling import PoolingParams, PoolingTask
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import Neutral


class PoolingBody(Reads, Notes):
    """Fields of all endpoints of pooled models."""

    renamed: ClassVar[Mapping[str, str]] = {"normalize": "use_activation", "activation": "use_activation"}
    neutral: ClassVar[Neutral] = {
        **Reads.neutral,
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "embedding_type": ("float",),
        "embedding_types": (["float"],),
        "endianness": ("native", "little"),
        "late_chunking": (False,),
        "padding": ("do_not_pad",),
    }
    fixed_names: ClassVar[Mapping[str, str]] = {
        f"{FIELD}.": "",
        **dict.fromkeys(("text", "token_ids"), "input"),
        **dict.fromkeys(("timeout_ms", "timeout_s"), "timeout"),
    }

    model: str | None = None
    request_id: str | None = None
    priority: int | Literal["critical", "high", "normal", "low"] | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    truncate_prompt_tokens: int | None = None
    """Number of tokens of each text that are kept; -1: up to the model's maximum length. Unset: a text that is too long
    is refused.
    """
    truncation_side: Literal["left", "right"] | None = None
    """Side that is cut; unset: right, so that the first tokens are kept."""
    truncate: bool | Literal["NONE", "START", "END"] | None = None
    """Jina's and Cohere's name: texts that are too long are cut at this side, true: at their end."""
    use_activation: bool | None = None
    """Whether vectors are normalized, or scores activated; unset: as the model says."""
    normalize: bool | None = None
    """The same, of vectors, by vLLM's older name."""
    activation: bool | None = None
    """The same, of scores."""

    def bare(self, tenant: str, dimensions: int | None = None) -> GenerationRequest:
        """A request without a prompt. Raises `InvalidRequestError`, naming the field."""
        with naming(self.names):
            asked = (self.use_activation, self.normalize, self.activation)
            return GenerationRequest(
                model=self.model or "",
                request_id=self.request_id or "",
                priority=priority_of(self.priority),
                timeout_s=self.timeout,
                cache_salt=self.cache_salt or "",
                tenant=tenant,
                names=self.names,
                pooling=PoolingParams(
                    dimensions=dimensions, use_activation=next((one for one in asked if one is not None), None)
                ),
                sampling_params=self._truncating(),
            )

    def _truncating(self) -> SamplingParams:
        num_tokens, side = self.truncate_prompt_tokens, self.truncation_side
        if self.truncate not in (None, False, "NONE"):
            num_tokens = -1 if num_tokens is None else num_tokens
            side = side or ("left" if self.truncate == "START" else "right")
        return truncating(num_tokens, side)


B = TypeVar("B", bound=PoolingBody)


class InputBody(PoolingBody):
    """`POST /v1/classify`."""

    lists_of_ids = ("input",)

    input: str | Listed[str] | Listed[int] | Listed[Listed[int]]

    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        """One input or several. Raises `InvalidRequestError`."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if not given:
            raise InvalidRequestError("input", given, "must not be empty")
        if isinstance(given[0], int):
            return [tuple(given)]
        check_inputs("input", given)
        return [item if isinstance(item, str) else tuple(item) for item in given]


class EmbeddingBody(InputBody):
    """`POST /v1/embeddings`."""

    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None


class NumbersBody(EmbeddingBody):
    """`POST /pooling`."""

    task: str | None = None
    """Which numbers, by vLLM's name: embed or classify, as the model is; others are refused."""


class PairsBody(PoolingBody):
    """Fields of the endpoints of pairs of texts."""

    instruction: str | None = None
    max_tokens_per_query: int | None = None
    """Tokens beyond which a query is cut at its end; unset or 0: it is not."""
    max_tokens_per_doc: int | None = None
    """The same of each document."""

    def _check_together(self) -> None:
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if (given := getattr(self, name)) is not None and given < 0:
                raise InvalidRequestError(name, given, "must be at least 0")

    @property
    def most_tokens(self) -> PairTokens:
        return PairTokens(self.max_tokens_per_query or 0, self.max_tokens_per_doc or 0)


_QUERIES: Final = ("queries", "text_1", "data_1")
_DOCUMENTS: Final = ("documents", "text_2", "data_2", "items")


class ScoreBody(PairsBody):
    """`POST /v1/score`: pairs of texts, under any of the names that vLLM has had for them."""

    text_1: str | Listed[str] | None = None
    text_2: str | Listed[str] | None = None
    queries: str | Listed[str] | None = None
    documents: str | Listed[str] | None = None
    items: str | Listed[str] | None = None
    data_1: str | Listed[str] | None = None
    data_2: str | Listed[str] | None = None

    def texts(self) -> tuple[list[str], list[str]]:
        """Queries and documents. Raises `InvalidRequestError`."""
        return self._of(_QUERIES), self._of(_DOCUMENTS)

    def names(self) -> FieldNames:
        """Names of the two lists, as the body has them."""
        said = {
            names[0]: next((name for name in names if getattr(self, name) is not None), names[0])
            for names in (_QUERIES, _DOCUMENTS)
        }
        return FieldNames({**said, "text": said["documents"]}, super().names())

    def _of(self, names: Sequence[str]) -> list[str]:
        found = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        if len(found) != 1:
            raise InvalidRequestError(names[0], [name for name, _ in found], f"must be given once ({', '.join(names)})")
        ((name, value),) = found
        texts = [value] if isinstance(value, str) else list(value)
        check_inputs(name, texts)
        return texts


class RerankDocument(BaseModel):
    """A document as an object, as Cohere's older API and Jina's have it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str


class RerankBody(PairsBody):
    """`POST /v1/rerank`, `/v2/rerank` and `/rerank`."""

    fixed_names: ClassVar[Mapping[str, str]] = {**PoolingBody.fixed_names, "text": "documents"}

    query: str
    documents: Listed[str | RerankDocument]
    top_n: int | None = None
    """Best documents to return; unset or 0: all."""
    return_documents: bool | None = None
    max_chunks_per_doc: int | None = None

    def _check_together(self) -> None:
        super()._check_together()
        if self.max_chunks_per_doc is not None:
            limit = "must not be set: documents are not cut into chunks; max_tokens_per_doc cuts them at their end"
            raise InvalidRequestError("max_chunks_per_doc", self.max_chunks_per_doc, limit)
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequestError("top_n", self.top_n, "must be at least 0")
        check_inputs("documents", self.documents)

    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


_SCORE: Final = (ScoreBody, "Scores of pairs of texts.")
_RERANK: Final = (RerankBody, "Documents by their relevance to a query, best first.")
_CLASSIFY: Final = (InputBody, "Scores of texts by label.")


class PoolingEndpoints:
    """Endpoints of pooled models at one router. Errors are raised as `HoldfastError`."""

    bodies: ClassVar[Mapping[str, tuple[type[Reads], str]]] = {
        "/v1/embeddings": (EmbeddingBody, "Vectors of texts."),
        "/pooling": (NumbersBody, "Vectors or scores of texts, as numbers."),
        **dict.fromkeys(("/score", "/v1/score"), _SCORE),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RERANK),
        **dict.fromkeys(("/classify", "/v1/classify"), _CLASSIFY),
    }

    def __init__(self, request_processor: RequestProcessor, reader: RequestReader) -> None:
        self._desk = PoolingDesk(request_processor)
        self._reader = reader

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Methods, paths and endpoints."""
        by_body: dict[type[Reads], Endpoint] = {
            ScoreBody: self.score,
            RerankBody: self.rerank,
            InputBody: self.classify,
        }
        return [
            ("POST", "/v1/embeddings", self.embeddings),
            ("POST", "/pooling", self.pooling),
            *(("POST", path, by_body[body]) for path, (body, _) in self.bodies.items() if body in by_body),
        ]

    async def embeddings(self, request: Request) -> ASGIApp:
        return await self._vectors(request, EmbeddingBody, "embedding", "embedding")

    async def pooling(self, request: Request) -> ASGIApp:
        return await self._vectors(request, NumbersBody, "pooling", "data")

    async def classify(self, request: Request) -> ASGIApp:
        body, bare = await self._body(request, InputBody, lambda one: one.bare(tenant_of(request)))
        with naming(body.names):
            labels = self._desk.facts(bare.model, PoolingTask.CLASSIFY).labels
        prompts = await self._pooled(request, bare, body.prompts())
        data = []
        for index, one in enumerate(prompts):
            probs = array("f", one.values).tolist()
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return json_response({**_head("classify"), "model": _model(prompts), "data": data, "usage": _usage(prompts)})

    async def score(self, request: Request) -> ASGIApp:
        """POST /score: one score for each pair of texts."""
        body, bare = await self._body(request, ScoreBody, lambda one: one.bare(tenant_of(request)))
        queries, documents = body.texts()
        expect_prompts(len(queries) + len(documents))
        wanted = self._desk.scores(bare, queries, documents, body.instruction, most=body.most_tokens)
        found = await unless_gone(request, wanted)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(found.scores)]
        usage, model = _usage(found.prompts), _model(found.prompts)
        return json_response({**_head("score"), "model": model, "data": data, "usage": usage})

    async def rerank(self, request: Request) -> ASGIApp:
        body, bare = await self._body(request, RerankBody, lambda one: one.bare(tenant_of(request)))
        texts = body.texts()
        expect_prompts(1 + len(texts))
        wanted = self._desk.scores(bare, [body.query], texts, body.instruction, most=body.most_tokens)
        found = await unless_gone(request, wanted)
        order = sorted(range(len(texts)), key=lambda index: (-found.scores[index], index))[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": at, "relevance_score": found.scores[at]} for at in order]
        if body.return_documents is not False:
            for one in results:
                one["document"] = {"text": texts[one["index"]]}
        usage, model = _usage(found.prompts), _model(found.prompts)
        return json_response({"id": _id("rerank"), "model": model, "results": results, "usage": usage})

    # --- inside ---

    async def _vectors(self, request: Request, made: type[EmbeddingBody], kind: str, name: str) -> ASGIApp:
        body, bare = await self._body(request, made, lambda one: one.bare(tenant_of(request), one.dimensions))
        with naming(body.names):
            found = self._desk.facts(bare.model, None if isinstance(body, NumbersBody) else PoolingTask.EMBED).task
            if isinstance(body, NumbersBody) and body.task not in (None, found):
                raise InvalidRequestError("task", body.task, f"must be {found}, as this model's, or unset")
        prompts = await self._pooled(request, bare, body.prompts())
        write = _base64 if body.encoding_format == "base64" else _floats
        content = await self._reader.made(
            sum(len(one.values) for one in prompts),
            lambda: json_response(
                {
                    **_head("pool" if isinstance(body, NumbersBody) else "embd"),
                    "model": _model(prompts),
                    "data": [
                        {"object": kind, "index": index, name: write(one.values)} for index, one in enumerate(prompts)
                    ],
                    "usage": _usage(prompts),
                }
            ),
        )
        return content

    async def _pooled(
        self, request: Request, bare: GenerationRequest, prompts: Sequence[str | tuple[int, ...]]
    ) -> list[PooledPrompt]:
        expect_prompts(len(prompts))
        found: list[PooledPrompt] = await unless_gone(request, self._desk.each(bare, prompts))
        return found

    async def _body(
        self, request: Request, kind: type[B], made_of: Callable[[B], GenerationRequest]
    ) -> tuple[B, GenerationRequest]:
        submission, content = await self._reader.submission(request)
        body, bare = await self._reader.decoded(content, kind, made_of)
        return body, submission.of(bare)


def _floats(values: bytes) -> list[float]:
    return array("f", values).tolist()


def _base64(values: bytes) -> str:
    return base64.b64encode(values).decode()


def _head(kind: str) -> dict[str, Any]:
    return {"id": _id(kind), "object": "list", "created": int(time.time())}


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _model(prompts: Sequence[PooledPrompt]) -> str:
    return prompts[0].model


def _usage(prompts: Iterable[PooledPrompt]) -> dict[str, Any]:
    num_tokens = sum(len(one.token_ids) for one in prompts)
    cached = sum(one.num_cached_tokens for one in prompts)
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": details,
    }
