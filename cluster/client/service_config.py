"""gRPC service config for stock clients: their own load balancing and retries, over all routers of a cluster.

    grpc.insecure_channel("ipv4:10.0.0.1:50051,10.0.0.2:50051", options=[("grpc.service_config", SERVICE_CONFIG)])

What may not live here: our own clients, which resume streams and need none of it (`async_client.py`).
"""

import json
from typing import Final

_SERVICES: Final = ("holdfast.v1.Inference", "inference.GRPCInferenceService")

SERVICE_CONFIG: Final = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        # Each router is watched by gRPC's health protocol, and gets calls while it has a replica and does not stop.
        "healthCheckConfig": {"serviceName": ""},
        "methodConfig": [
            {
                "name": [{"service": service} for service in _SERVICES],
                # Only before the first answer: a stream that has begun is not gRPC's to repeat. A router that says when
                # to come again (grpc-retry-pushback-ms) is obeyed.
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
                },
            }
        ],
    }
)
"""JSON, for the channel option `grpc.service_config`."""
