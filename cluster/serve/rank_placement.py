"""Placement of a model's ranks: resources and node labels of each rank, and warnings about slow placements."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.serve.placement_groups import (
    Resources,
    node_resources,
    rank_bundle,
    ranks_that_fit,
    unmet,
    whole_replicas,
)
from holdfast.cluster.serve.ray_internals import check_labels, free_resources, is_selected


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node: its resources, and which of them are free now."""

    labels: Mapping[str, str]
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainChoice:
    """Domains that a model's ranks may be placed in."""

    domains: tuple[str, ...]
    """Values of the label; none: on any nodes."""
    is_one: bool
    """Whether each replica is sure to lie in one domain."""

    def selector(self, label: str) -> dict[str, str]:
        """Label selector in Ray's form."""
        if not self.domains:
            return {}
        return {label: self.domains[0] if len(self.domains) == 1 else f"in({','.join(self.domains)})"}


def choose_domains(
    label: str, bundle: Resources, num_ranks: int, num_replicas: int, nodes: Sequence[Node]
) -> DomainChoice:
    """One domain for all replicas of `num_ranks` ranks: the one with the least free space that suffices, so that larger
    domains stay free.

    Free resources count before total resources: a rolling update frees the resources of the old replicas. Where no
    domain has room for all of them, Ray may take any that has room for one, and then a replica may lie across two.
    Where no domain has even that, or all replicas fit on single nodes, the label decides nothing.
    """
    domains: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        if label in node.labels:
            domains[node.labels[label]].append(node)
    free = {name: _num_replicas((node.free for node in found), bundle, num_ranks) for name, found in domains.items()}
    total = {name: _num_replicas((node.total for node in found), bundle, num_ranks) for name, found in domains.items()}
    for room in (free, total):
        fitting = [(whole, name) for name, whole in room.items() if whole >= num_replicas]
        if fitting:
            return DomainChoice(domains=(min(fitting)[1],), is_one=True)
    if sum(ranks_that_fit(node.total, bundle) // num_ranks for node in nodes) >= num_replicas:
        return DomainChoice(domains=(), is_one=True)
    possible = tuple(sorted(name for name, whole in total.items() if whole))
    enough = sum(total[name] for name in possible) >= num_replicas
    return DomainChoice(domains=possible if enough else (), is_one=False)


def _num_replicas(nodes: Iterable[Resources], bundle: Resources, num_ranks: int) -> int:
    return sum(ranks_that_fit(node, bundle) for node in nodes) // num_ranks


def known_nodes(selector: Mapping[str, str]) -> list[Node]:
    """The living nodes that ranks may run on, of the cluster that this process is connected to."""
    free = free_resources()
    return [
        Node(labels=node["Labels"], total=node["Resources"], free=free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"] and is_selected(node["Labels"], selector)
    ]


def domains_of(label: str, node_ids: Collection[str]) -> set[str]:
    """The domains that these nodes are in; a node without the label is one by itself."""
    return {node["Labels"].get(label, node["NodeID"]) for node in ray.nodes() if node["NodeID"] in set(node_ids)}


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Placement of one model's ranks for Ray, as the nodes are now."""

    bundle: dict[str, float]
    """Resources of each rank."""
    labels: dict[str, str]
    """Labels that nodes must have, if not empty."""

    @classmethod
    def of(cls, config: HoldfastConfig) -> "RankPlacement":
        """Raises `ConfigurationError` for labels that Ray cannot read. Warns of what there is no room for yet."""
        cluster, nodes = config.cluster, node_resources()
        warn_of_unmet("rank", cluster.rank_resources, nodes)
        bundle = rank_bundle(config.worker, cluster, nodes)
        check_labels("cluster.rank_labels", cluster.rank_labels)
        if cluster.domain_label is not None:
            check_labels("cluster.domain_label", {cluster.domain_label: ""})
        domains = _domains(config, bundle)
        if domains is None or not domains.domains:
            _warn_of_room(config, bundle, nodes)
        return cls(bundle=bundle, labels=_rank_labels(cluster, domains))


def warn_of_unmet(setting: str, resources: Resources, nodes: Collection[Resources]) -> None:
    """No error, because a cluster may grow."""
    for name in unmet(resources, nodes):
        logger.warning(
            "cluster.%s_resources: no node has %g of %s yet; they wait for one", setting, resources[name], name
        )


def _domains(config: HoldfastConfig, bundle: Resources) -> DomainChoice | None:
    """Domains for the ranks of all replicas, given the nodes now; None: no domains are asked for."""
    cluster, num_ranks = config.cluster, config.parallel.tensor_parallel_size
    if cluster.domain_label is None or num_ranks == 1:
        return None
    nodes = known_nodes(cluster.rank_labels)
    chosen = choose_domains(cluster.domain_label, bundle, num_ranks, config.most_replicas, nodes)
    if not chosen.is_one:
        logger.warning(
            "%d replicas of %d ranks do not fit into one domain of cluster.domain_label = %s: ranks of one replica may "
            "talk over slow links in every layer",
            config.most_replicas,
            num_ranks,
            cluster.domain_label,
        )
    return chosen


def _rank_labels(cluster: ClusterConfig, domains: DomainChoice | None) -> dict[str, str]:
    if domains is None or cluster.domain_label is None:
        return cluster.rank_labels
    return cluster.rank_labels | domains.selector(cluster.domain_label)


def _warn_of_room(config: HoldfastConfig, bundle: Resources, nodes: Collection[Resources]) -> None:
    """No error, because a cluster may grow. A replica of one rank lies on one node anyway, and waits for it."""
    num_ranks = config.parallel.tensor_parallel_size
    num_whole = whole_replicas(bundle, num_ranks, nodes)
    if num_ranks == 1 or num_whole >= config.most_replicas:
        return
    message = "%d replicas of %d ranks do not fit on whole nodes, which have room for %d: "
    if config.cluster.span_nodes:
        message += "ranks of one replica may talk over the network in every layer, which is slow unless it is very fast"
    else:
        message += "the others wait for nodes (cluster.span_nodes lets a replica lie on several)"
    logger.warning(message, config.most_replicas, num_ranks, num_whole)
