"""Protobuf codec of answers of the public API: to messages for routers, from messages for clients."""

from collections.abc import Iterable, Sequence

from holdfast.router.events import ModelStatus, ReplicaLoad, Usage
from holdfast.router.generation import Chunk, GeneratedSequence, Generation
from holdfast.router.wire.chat_codec import (
    chat_delta,
    chat_delta_message,
    chat_output,
    chat_output_message,
)
from holdfast.router.wire.resume_codec import FINISH_REASONS, FINISH_REASONS_READ
from holdfast.v1 import inference_pb2
from holdfast.worker.request import TokenLogprob
from holdfast.worker.step_update import EngineStats


def chunk(message: inference_pb2.GenerateStreamResponse) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        sequence_index=message.sequence_index,
        first_token_index=message.first_token_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=FINISH_REASONS_READ.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_prompt_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        chat=chat_delta(message.chat) if message.HasField("chat") else None,
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def chunk_message(chunk: Chunk) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(
        request_id=chunk.request_id,
        sequence_index=chunk.sequence_index,
        first_token_index=chunk.first_token_index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        finish_reason=FINISH_REASONS[chunk.finish_reason],
        logprobs=map(_logprob_message, chunk.logprobs),
        prompt_logprobs=map(_logprob_message, filter(None, chunk.prompt_logprobs)),
        usage=None if chunk.usage is None else _usage_message(chunk.usage),
        chat=None if chunk.chat is None else chat_delta_message(chunk.chat),
        replayed_without_guarantee=chunk.replayed_without_guarantee,
        system_fingerprint=chunk.system_fingerprint,
    )


def generation(message: inference_pb2.GenerateResponse) -> Generation:
    return Generation(
        request_id=message.request_id,
        model=message.model,
        completions=tuple(map(_sequence, message.completions)),
        usage=_usage(message.usage),
        prompt_logprobs=_prompt_logprobs(message.completions[0].prompt_logprobs if message.completions else ()),
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def generation_message(generation: Generation) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        model=generation.model,
        completions=map(_sequence_message, generation.completions),
        usage=_usage_message(generation.usage),
        replayed_without_guarantee=generation.replayed_without_guarantee,
        system_fingerprint=generation.system_fingerprint,
    )
    if logprobs := [item for item in generation.prompt_logprobs if item is not None]:
        message.completions[0].prompt_logprobs.extend(map(_logprob_message, logprobs))
    return message


def _sequence(message: inference_pb2.Completion) -> GeneratedSequence:
    return GeneratedSequence(
        sequence_index=message.sequence_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=FINISH_REASONS_READ.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        chat=chat_output(message.chat) if message.HasField("chat") else None,
    )


def _sequence_message(sequence: GeneratedSequence) -> inference_pb2.Completion:
    return inference_pb2.Completion(
        sequence_index=sequence.sequence_index,
        token_ids=sequence.token_ids,
        text=sequence.text,
        finish_reason=FINISH_REASONS[sequence.finish_reason],
        logprobs=map(_logprob_message, sequence.logprobs),
        cumulative_logprob=sequence.cumulative_logprob,
        chat=None if sequence.chat is None else chat_output_message(sequence.chat),
    )


# --- parts of responses ---


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.prompt_tokens,
        num_completion_tokens=message.completion_tokens,
        num_cached_tokens=message.cached_prompt_tokens,
    )


def _usage_message(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        cached_prompt_tokens=usage.num_cached_tokens,
    )


def _prompt_logprobs(items: Sequence[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob | None, ...]:
    """On the wire they begin with the second token, because the first has no log-probability."""
    return (None, *_logprobs(items)) if items else ()


def _logprobs(items: Sequence[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=item.token_id,
            logprob=item.logprob,
            rank=item.rank,
            top=tuple((best.token_id, best.logprob) for best in item.top),
        )
        for item in items
    )


def _logprob_message(item: TokenLogprob) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in item.top]
    return inference_pb2.TokenLogprob(token_id=item.token_id, logprob=item.logprob, rank=item.rank, top=top)


def models_response(models: Iterable[ModelStatus]) -> inference_pb2.ListModelsResponse:
    return inference_pb2.ListModelsResponse(
        models=[
            inference_pb2.Model(
                name=model.name,
                max_model_len=model.facts.max_model_len,
                vocab_size=model.facts.vocab_size,
                num_replicas=model.num_replicas,
                tensor_parallel_size=model.facts.tensor_parallel_size,
                row_invariant=model.facts.row_invariant,
                quantization=model.facts.quantization,
                weight_bytes=model.facts.weight_bytes,
            )
            for model in models
        ]
    )


def load_response(num_queued: int, num_open: int, replicas: Iterable[ReplicaLoad]) -> inference_pb2.GetLoadResponse:
    return inference_pb2.GetLoadResponse(
        num_queued=num_queued,
        num_open=num_open,
        replicas=[
            inference_pb2.ReplicaLoad(
                replica_id=replica.replica_id,
                model=replica.model,
                num_running=replica.load.num_running,
                num_waiting=replica.load.num_waiting,
                num_free_blocks=replica.load.num_free_blocks,
                num_total_blocks=replica.load.num_total_blocks,
                stats=None if replica.stats is None else _replica_stats(replica.stats),
            )
            for replica in replicas
        ],
    )


def _replica_stats(stats: EngineStats) -> inference_pb2.ReplicaStats:
    """Copies every field of the message by name."""
    names = inference_pb2.ReplicaStats.DESCRIPTOR.fields_by_name
    return inference_pb2.ReplicaStats(**{name: getattr(stats, name) for name in names})
