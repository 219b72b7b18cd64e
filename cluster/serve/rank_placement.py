"""Placement of a model's ranks: what each takes of a node, on nodes with which labels, and what is warned of.

What may not live here: placement groups (`placement_groups.py`), the choice of domains (`domains.py`), and deployments
(`app.py`).
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.serve.domains import DomainChoice, choose_domains, known_nodes
from holdfast.cluster.serve.placement_groups import (
    Resources,
    check_labels,
    node_resources,
    rank_bundle,
    unmet,
    whole_replicas,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """What Ray is told of one model's ranks, as the nodes are now."""

    bundle: dict[str, float]
    """What each rank takes."""
    labels: dict[str, str]
    """What nodes must have, if not empty."""

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
    """Where the ranks of all replicas go, as the nodes are now; None: no domains are asked for."""
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
    told = "%d replicas of %d ranks do not fit on whole nodes, which have room for %d: "
    if config.cluster.span_nodes:
        told += "ranks of one replica may talk over the network in every layer, which is slow unless it is very fast"
    else:
        told += "the others wait for nodes (cluster.span_nodes lets a replica lie on several)"
    logger.warning(told, config.most_replicas, num_ranks, num_whole)
