"""A Ray cluster of labelled nodes on this machine, and a replica of two ranks that has to choose among them.

    python -m tests.cluster.serve.labelled_nodes FILE     # writes a JSON object

A program of its own, because a process has one connection to Ray.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import ray
from ray.cluster_utils import Cluster

from holdfast.cluster.client.blocking_client import Client
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.serve.ray_internals import session_folder
from holdfast.cluster.serve.serving import serving
from holdfast.worker.config import CacheConfig, ParallelConfig
from holdfast.worker.sampling_params import SamplingParams

DOMAIN: Final = "holdfast/domain"
PLACE: Final = "place"
MEMORY: Final = 80 * 2**20


def config(address: str, label: str) -> HoldfastConfig:
    return HoldfastConfig(
        cluster=ClusterConfig(
            address=address,
            host="127.0.0.1",
            port=0,
            http_port=None,
            routers=1,
            cpus_per_rank=0.5,
            rank_resources={PLACE: 1.0},
            span_nodes=True,
            domain_label=label,
            drain_timeout_s=1.0,
        ),
        parallel=ParallelConfig(tensor_parallel_size=2, num_threads=1),
        cache=CacheConfig(kv_cache_memory=2**24),
    )


def ranks_domains(label: str) -> list[str]:
    """Of the nodes on which the ranks of the one replica lie."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    groups = [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    (bundles,) = (one["bundles_to_node_id"] for one in groups)
    return sorted(labels[node].get(label, "none") for node in bundles.values())


def served(address: str, label: str) -> dict[str, Any]:
    with serving(config(address, label), lambda *_: None) as cluster, Client(cluster.routers[0]) as client:
        answer = client.generate("The capital of France is", SamplingParams(temperature=0.0, seed=0, max_tokens=8))
        return {"domains": ranks_domains(label), "text": answer.completions[0].text}


def warnings() -> str:
    """What replicas have logged."""
    logs = session_folder() / "logs"
    texts = (path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file())
    return "\n".join(line for text in texts for line in text.splitlines() if "lie across domains" in line)


def main() -> None:
    head = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": MEMORY}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for domain, twin in (("slow", "x"), ("fast", "y"), ("fast", "z"), ("other", "w")):
            nodes.add_node(
                num_cpus=1,
                resources={PLACE: 1},
                labels={DOMAIN: domain, "holdfast/host": twin},
                object_store_memory=MEMORY,
            )
        nodes.wait_for_nodes()
        one = served(nodes.address, DOMAIN)
        across = served(nodes.address, "holdfast/host")
        ray.init(address=nodes.address, ignore_reinit_error=True)
        found = {"one domain": one, "text": one["text"], "no domain has room": across | {"warned": warnings()}}
        Path(sys.argv[1]).write_text(json.dumps(found))
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main()
