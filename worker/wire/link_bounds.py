"""Static bounds of what a router sends to a replica: wide, for routers hold their clients to narrower ones."""

from collections.abc import Callable
from typing import Final

from holdfast.v1 import engine_pb2
from holdfast.worker.sampling_params import MAX_LOGPROB_TOKEN_IDS
from holdfast.worker.wire.bound import Bound
from holdfast.worker.wire.message_bounds import Bounds, MessageBounds

_TOKENS: Final = Bound(count=2**23)
_NAME: Final = Bound(size=2**16)

LINK_BOUNDS: Final[Bounds] = {
    "holdfast.v1.Submit": {
        "prompt_token_ids": _TOKENS,
        "output_token_ids": _TOKENS,
        **dict.fromkeys(("cache_salt", "tenant", "group_id", "request_id", "traceparent"), _NAME),
    },
    "holdfast.v1.EngineSamplingParams": {
        "stop_token_ids": _TOKENS,
        "logprob_token_ids": Bound(count=MAX_LOGPROB_TOKEN_IDS),
        "logit_bias": Bound(count=2**15),
        "allowed_token_ids": _TOKENS,
        "bad_words": Bound(count=2**14),
        "grammar": Bound(size=2**24),
    },
    "holdfast.v1.TokenSequence": {"ids": Bound(count=2**20)},
    "holdfast.v1.SetLogLevel": {"level": _NAME},
}


def link_request_parser() -> Callable[[bytes], engine_pb2.LinkRequest]:
    """Reads messages of routers. What it returns raises `DecodeError`, `MalformedMessageError`, and
    `InvalidRequestError` for what is beyond its bound.
    """
    check = MessageBounds.of(engine_pb2.LinkRequest.DESCRIPTOR, LINK_BOUNDS).check

    def parse(data: bytes) -> engine_pb2.LinkRequest:
        check(data)
        return engine_pb2.LinkRequest.FromString(data)

    return parse
