"""Ray placement groups of replicas: one bundle per rank, and the ranks as Ray actors inside them.

The replica's actor is the leader and sits in bundle 0; rank i is a child actor in bundle i.
"""

import importlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from holdfast.cluster.config.config import ClusterConfig
from holdfast.worker.config import WorkerConfig
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.replica.processes import ProcessId
from holdfast.worker.replica.rank import run_rank
from holdfast.worker.wire.loopback import ANY_INTERFACE, LOOPBACK

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]
"""Resources as Ray counts them: `CPU`, `GPU`, and custom resources by name."""

SLOW_IMPORTS: Final = ("torch", "holdfast.worker.engine.model_runner")
KILL_WAIT_S: Final = 5.0


def rank_bundle(worker: WorkerConfig, cluster: ClusterConfig, nodes: Collection[Resources]) -> dict[str, float]:
    """Resources of one rank. With device `auto` it is a GPU wherever a node that it may run on has any."""
    possible = [node for node in nodes if not unmet(cluster.rank_resources, [node])] or nodes
    has_gpus = any(node.get("GPU", 0) >= 1 for node in possible)
    wants_gpu = worker.model.device == "cuda" or (worker.model.device == "auto" and has_gpus)
    cpus = {"CPU": cluster.cpus_per_rank} if cluster.cpus_per_rank else {}
    return {**cpus, **({"GPU": 1.0} if wants_gpu else {}), **cluster.rank_resources}


def unmet(resources: Resources, nodes: Iterable[Resources]) -> list[str]:
    """The resources, by name, of which no single node has so much."""
    return [name for name, amount in resources.items() if all(node.get(name, 0) < amount for node in nodes)]


def whole_replicas(bundle: Resources, num_ranks: int, nodes: Iterable[Resources]) -> int:
    """Replicas that fit on single nodes with all of their ranks.

    `nodes` are the resources of each node, used or not: a rolling update frees the resources of the old replicas.
    """
    return sum(ranks_that_fit(node, bundle) // num_ranks for node in nodes)


def ranks_that_fit(node: Resources, bundle: Resources) -> int:
    """Ranks that a node has room for."""
    return int(min(node.get(kind, 0) // amount for kind, amount in bundle.items()))


def node_resources() -> list[dict[str, float]]:
    """The resources of each living node of the cluster that this process is connected to."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def reachable(address: str) -> str:
    """Address that others dial: this machine's, if a port is listened on at all interfaces."""
    host, _, port = address.rpartition(":")
    return f"{ray.util.get_node_ip_address()}:{port}" if host == ANY_INTERFACE else address


class RankActor:
    """A rank that is not the leader, in a separate process. `run` lasts as long as the rank lives."""

    def __init__(self) -> None:
        for module in SLOW_IMPORTS:  # while the leader imports them too
            importlib.import_module(module)

    def where(self) -> tuple[str, ProcessId]:
        """The node and the process, for ending a rank that does not answer."""
        return ray.get_runtime_context().get_node_id(), ProcessId.of(os.getpid())

    def run(self, config: WorkerConfig, rank: int, rendezvous: Rendezvous, has_gpu: bool) -> None:
        import torch

        # Ray shows an actor its own GPUs alone, so each rank's is the first.
        run_rank(config, rank, rendezvous, torch.device("cuda", 0) if has_gpu else torch.device("cpu"))


class RayLauncher:
    """A `RankLauncher` for a leader that runs in a placement group of one bundle per rank.

    The actors are made at once, so that their processes start while the leader's does.
    """

    def __init__(self, bundle: Resources, num_ranks: int) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None or num_ranks == 1, "the leader runs inside its replica's placement group"
        self._group = group
        self._has_gpu = "GPU" in bundle
        self._actors = {rank: _rank_actor(bundle, group, rank) for rank in range(1, num_ranks)}

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def node_ids(self) -> set[str]:
        """Nodes of this replica's ranks."""
        if self._group is None:
            return {ray.get_runtime_context().get_node_id()}
        return set(ray.util.placement_group_table(self._group)["bundles_to_node_id"].values())

    @property
    def meeting_host(self) -> str:
        return LOOPBACK if len(self.node_ids()) == 1 else self.host

    def launch(self, config: WorkerConfig, rendezvous: Rendezvous) -> "RayRanks":
        places = [actor.where.remote() for actor in self._actors.values()]
        runs = {rank: actor.run.remote(config, rank, rendezvous, self._has_gpu) for rank, actor in self._actors.items()}
        return RayRanks(self._actors, runs, places)


def _rank_actor(bundle: Resources, group: Any, rank: int) -> Any:
    """An actor in bundle `rank`. It ends with the leader, which owns it, and never comes back without it."""
    options = {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    }
    return ray.remote(RankActor).options(**options).remote()


class RayRanks:
    """Rank actors, watched through the results of their one long call."""

    def __init__(self, actors: dict[int, Any], runs: dict[int, Any], places: list[Any]) -> None:
        self._actors = actors
        self._runs = runs
        self._places = places

    def wait(self) -> str:
        ended, _ = ray.wait(list(self._runs.values()), num_returns=1)
        rank = next(rank for rank, run in self._runs.items() if run == ended[0])
        try:
            ray.get(ended[0])
        except ray.exceptions.OutOfMemoryError:
            return f"rank {rank} was ended by Ray's memory monitor: its machine has run out of memory"
        except ray.exceptions.RayActorError as error:
            return f"rank {rank} died: {type(error).__name__}"
        except ray.exceptions.RayError as error:
            return f"rank {rank} failed: {' '.join(str(error).split())[-300:]}"
        return f"rank {rank} ended"

    def stop(self) -> None:
        _, left = ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=KILL_WAIT_S)
        if left:
            self.kill()
        else:
            self._dismiss()

    def kill(self) -> None:
        """SIGKILL at once: Ray would ask first and kill seconds later, and a stopped process cannot answer."""
        for process in self.processes_here():
            with suppress(ProcessLookupError):
                process.kill()
        self._dismiss()

    def processes_here(self) -> list[ProcessId]:
        known, _ = ray.wait(self._places, num_returns=len(self._places), timeout=0)
        this_node, processes = ray.get_runtime_context().get_node_id(), []
        for place in known:
            with suppress(ray.exceptions.RayError):  # it has ended before it could say where it is
                node, process = ray.get(place)
                processes += [process] if node == this_node else []
        return processes

    def _dismiss(self) -> None:
        """Has Ray end the processes, which it counts as no accident."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
