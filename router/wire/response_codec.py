"""Protobuf codec of answers of the public API: to messages for routers, from messages for clients."""

from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.router.events import ModelStatus, ReplicaLoad, StoreFigures
from holdfast.router.generation import Generation, OutputDelta, RequestFigures, Usage
from holdfast.router.wire.chat_codec import (
    chat_delta_message,
    chat_output,
    chat_output_message,
)
from holdfast.router.wire.resume_codec import FINISH_REASONS, FINISH_REASONS_READ
from holdfast.v1 import inference_pb2
from holdfast.worker.request import TokenLogprob
from holdfast.worker.step_update import EngineStats

_TIMES: Final = ("queue_s", "prompt_s", "first_token_s", "decode_s", "total_s")
_COUNTS: Final = ("disk_tokens", "draft_tokens", "accepted_tokens", "attempts")


def output_delta(message: inference_pb2.GenerateStreamResponse) -> OutputDelta:
    """Output delta of a streamed message."""
    return OutputDelta(
        request_id=message.request_id,
        sequence_index=message.sequence_index,
        first_token_index=message.first_token_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=FINISH_REASONS_READ.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_prompt_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        chat=chat_output(message.chat) if message.HasField("chat") else None,
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def delta_message(delta: OutputDelta) -> inference_pb2.GenerateStreamResponse:
    """Message of an output delta."""
    return inference_pb2.GenerateStreamResponse(
        request_id=delta.request_id,
        sequence_index=delta.sequence_index,
        first_token_index=delta.first_token_index,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=FINISH_REASONS[delta.finish_reason],
        logprobs=map(_logprob_message, delta.logprobs),
        prompt_logprobs=map(_logprob_message, filter(None, delta.prompt_logprobs)),
        usage=None if delta.usage is None else _usage_message(delta.usage),
        chat=None if delta.chat is None else chat_delta_message(delta.chat),
        replayed_without_guarantee=delta.replayed_without_guarantee,
        system_fingerprint=delta.system_fingerprint,
    )


def generation(message: inference_pb2.GenerateResponse) -> Generation:
    """Generation of a message."""
    return Generation(
        request_id=message.request_id,
        model=message.model,
        completions=tuple(_completion(message, one) for one in message.completions),
        usage=_usage(message.usage),
    )


def generation_message(generation: Generation) -> inference_pb2.GenerateResponse:
    """Message of a whole generation."""
    return inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        model=generation.model,
        completions=map(_completion_message, generation.completions),
        usage=_usage_message(generation.usage),
        replayed_without_guarantee=generation.replayed_without_guarantee,
        system_fingerprint=generation.system_fingerprint,
    )


def _completion(generation: inference_pb2.GenerateResponse, message: inference_pb2.Completion) -> OutputDelta:
    return OutputDelta(
        request_id=generation.request_id,
        first_token_index=0,
        sequence_index=message.sequence_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=FINISH_REASONS_READ.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_prompt_logprobs(message.prompt_logprobs),
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        chat=chat_output(message.chat) if message.HasField("chat") else None,
        replayed_without_guarantee=generation.replayed_without_guarantee,
        system_fingerprint=generation.system_fingerprint,
    )


def _completion_message(completion: OutputDelta) -> inference_pb2.Completion:
    return inference_pb2.Completion(
        sequence_index=completion.sequence_index,
        token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=FINISH_REASONS[completion.finish_reason],
        logprobs=map(_logprob_message, completion.logprobs),
        prompt_logprobs=map(_logprob_message, filter(None, completion.prompt_logprobs)),
        cumulative_logprob=completion.cumulative_logprob,
        chat=None if completion.chat is None else chat_output_message(completion.chat),
    )


# --- parts of responses ---


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.prompt_tokens,
        num_completion_tokens=message.completion_tokens,
        num_cached_tokens=message.cached_prompt_tokens,
        figures=_figures(message.figures) if message.HasField("figures") else None,
    )


def _figures(message: inference_pb2.RequestFigures) -> RequestFigures:
    return RequestFigures(
        **{name: getattr(message, name) for name in _TIMES},
        **{f"num_{name}": getattr(message, name) for name in _COUNTS},
    )


def _figures_message(figures: RequestFigures) -> inference_pb2.RequestFigures:
    return inference_pb2.RequestFigures(
        **{name: getattr(figures, name) for name in _TIMES},
        **{name: getattr(figures, f"num_{name}") for name in _COUNTS},
    )


def _usage_message(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        cached_prompt_tokens=usage.num_cached_tokens,
        figures=None if usage.figures is None else _figures_message(usage.figures),
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
    """Message that lists models, in the given order."""
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


def load_response(
    num_queued: int,
    num_open: int,
    replicas: Iterable[ReplicaLoad],
    stored: StoreFigures | None = None,
) -> inference_pb2.GetLoadResponse:
    """Message of a router's load: requests that wait for a replica, open requests, and each replica. `stored`: figures
    of its store, if it has one.
    """
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
                role=replica.role,
                received_tokens_from=replica.received_from,
                stats=None if replica.stats is None else _replica_stats(replica.stats),
            )
            for replica in replicas
        ],
        store=None if stored is None else _store_load(stored),
    )


def _store_load(stored: StoreFigures) -> inference_pb2.StoreLoad:
    by_state = {
        state: sum(count for (_, one), count in stored.num_jobs.items() if one == state)
        for state in ("waiting", "running")
    }
    return inference_pb2.StoreLoad(
        num_bytes=stored.num_bytes,
        max_bytes=stored.max_bytes,
        num_objects=sum(stored.num_objects.values()),
        num_jobs_waiting=by_state["waiting"],
        num_jobs_running=by_state["running"],
        oldest_job_s=stored.oldest_job_s,
    )


def _replica_stats(stats: EngineStats) -> inference_pb2.ReplicaStats:
    """Copies every field of the message by name."""
    names = inference_pb2.ReplicaStats.DESCRIPTOR.fields_by_name
    return inference_pb2.ReplicaStats(**{name: getattr(stats, name) for name in names})
