"""Demand of each model in one router, read off its tables, for the autoscaler."""

from collections.abc import Iterable, Mapping

from holdfast.router.demand import ModelDemand, ReplicaDemand
from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_stats import FirstTokens
from holdfast.router.events import ModelStatus


def demands(
    models: Iterable[ModelStatus],
    requests: Iterable[RequestState],
    registry: ReplicaRegistry,
    first_tokens: Mapping[str, FirstTokens],
    now: float,
) -> tuple[ModelDemand, ...]:
    """One for each of `models`. Retiring replicas are left out: they take nothing new. Linear in the open requests."""
    open_of: dict[str, list[RequestState]] = {model.name: [] for model in models}
    for state in requests:
        if state.model in open_of:
            open_of[state.model].append(state)
    replicas_of: dict[str, list[ReplicaDemand]] = {name: [] for name in open_of}
    for replica in registry:
        if replica.facts.model in replicas_of and not replica.is_retiring:
            replicas_of[replica.facts.model].append(_of_replica(replica))
    return tuple(
        _of_model(name, states, replicas_of[name], first_tokens.get(name, FirstTokens()), now)
        for name, states in open_of.items()
    )


def _of_model(
    name: str, states: list[RequestState], replicas: list[ReplicaDemand], first: FirstTokens, now: float
) -> ModelDemand:
    queued = [state for state in states if state.status.is_waiting]
    return ModelDemand(
        model=name,
        num_open=len(states),
        num_queued=len(queued),
        num_queued_tokens=sum(len(one.request.prompt_token_ids) + len(one.output_token_ids) for one in queued),
        longest_wait_s=max((now - one.timeline.opened_s for one in states if not one.output_token_ids), default=0.0),
        num_arrived=first.num_arrived - first.num_left,
        num_left=first.num_left,
        num_first_tokens=first.num_first_tokens,
        ttft_s=first.ttft_s(now),
        replicas=tuple(replicas),
    )


def _of_replica(replica: ReplicaState) -> ReplicaDemand:
    load, computed = replica.load, replica.computed
    return ReplicaDemand(
        replica_id=replica.facts.replica_id,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        kv_use=1 - load.num_free_blocks / max(1, load.num_total_blocks),
        num_prefill_tokens=computed.num_tokens,
        prefill_tokens_per_s=computed.tokens_per_s,
    )
