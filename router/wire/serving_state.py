"""Protobuf codec of `ListModels` and `GetLoad` responses. Clients use the messages without conversion."""

from collections.abc import Iterable

from holdfast.router.events import ModelStatus, ReplicaLoad
from holdfast.v1 import inference_pb2
from holdfast.worker.stats import EngineStats


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
