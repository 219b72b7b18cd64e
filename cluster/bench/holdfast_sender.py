"""Sender over gRPC to our own API (`holdfast.v1.Inference`), without the client's retries: every failure counts.

What may not live here: channels (`cluster/client/transport.py`), messages field by field (`router/wire/`).
"""

import dataclasses

from holdfast.cluster.bench.sender import Ask, OnPiece, Reply, SendFailed
from holdfast.cluster.client.async_client import submission
from holdfast.cluster.client.transport import CallFailed, GrpcTransport
from holdfast.router.wire.request_codec import generation_request_message
from holdfast.worker.errors import HoldfastError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.security.tls import Tls


class HoldfastSender:
    """Requests take turns over the routers."""

    def __init__(
        self,
        addresses: list[str],
        model: str,
        *,
        is_chat: bool,
        params: SamplingParams,
        api_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._addresses = addresses
        self._num_sent = 0
        self._model = model
        self._is_chat = is_chat
        self._params = params
        self._transport = GrpcTransport(api_key, tls)

    async def send(self, ask: Ask, on_piece: OnPiece) -> Reply:
        address = self._addresses[self._num_sent % len(self._addresses)]
        self._num_sent += 1
        texts: list[str] = []
        usage = None
        try:
            async for message in self._transport.call(address, "GenerateStream", self._message(ask)):
                if message.token_ids:
                    on_piece()
                texts.append(message.text)
                if message.HasField("usage"):
                    usage = message.usage
        except CallFailed as failed:
            kind = failed.status.code.name.lower().replace("_", " ")
            raise SendFailed(kind, failed.status.message) from failed
        if usage is None:
            raise SendFailed("cut off", "the stream ended before the answer did")
        return Reply(
            text="".join(texts),
            num_output_tokens=usage.completion_tokens,
            num_prompt_tokens=usage.prompt_tokens,
        )

    async def close(self) -> None:
        await self._transport.close()

    def _message(self, ask: Ask) -> object:
        params = self._params.with_changes(max_tokens=ask.num_output_tokens)
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(ask.texts)]
        try:
            request = submission(
                None if self._is_chat else ask.prompt,
                params,
                messages if self._is_chat else None,
                model=self._model,
                request_id="",
            )
        except HoldfastError as error:
            raise SendFailed("invalid argument", str(error)) from error
        # It is not made again, so a router that stops lets it end rather than send it elsewhere.
        return generation_request_message(dataclasses.replace(request, attempt=0))
