"""Router configuration: validated, frozen settings in two groups. `cluster/config/` loads them.

What may not live here: reading files or the environment, and values that are known only once replicas are up.
"""

from typing import Literal

from pydantic import Field

from holdfast.worker.config import Bytes, Settings


class LimitsConfig(Settings):
    """Limits on requests."""

    max_queued: int = Field(
        1024,
        ge=0,
        description="requests that may wait in one router for a replica; then a tenant below its share may still enter",
    )
    default_timeout_s: float = Field(600.0, gt=0, description="seconds a request may take if it names no timeout")
    max_timeout_s: float = Field(3600.0, gt=0, description="longest timeout a request may name, in seconds")
    max_prompt_bytes: Bytes = Field(512 * 2**10, ge=1, description="bytes of a prompt's text, in UTF-8")
    max_message_bytes: Bytes = Field(32 * 2**20, ge=2**20, description="bytes of a whole gRPC request")
    max_request_id_length: int = Field(128, ge=32, description="characters of a request id")
    max_stop_strings: int = Field(64, ge=0, description="stop strings of one request")
    max_stop_string_length: int = Field(1024, ge=1, description="characters of one stop string")
    max_bad_words: int = Field(256, ge=0, description="bad words of one request")
    max_bad_word_length: int = Field(256, ge=1, description="characters of one bad word")
    max_sequences: int = Field(64, ge=1, description="completions of one request: its n, or its best_of")
    max_grammar_length: int = Field(
        64 * 2**10, ge=0, description="characters of a schema, a regex, a grammar, or all choices of one request"
    )


class RouterConfig(Settings):
    """Routing, links to replicas, retries, and the router's own port."""

    # Prefix-aware by default: chats and shared system prompts are the common case. A prompt that is cached nowhere
    # costs one hash and is routed by power of two choices; on the wire, a cached block costs 8 bytes once.
    routing_policy: Literal["prefix_aware", "power_of_two"] = Field(
        "prefix_aware", description="prefix_aware: to where most of the prompt is cached, unless it is too full there"
    )
    max_waiting_per_replica: int = Field(
        64, ge=1, description="requests that may wait in one replica before they wait in the router instead"
    )
    replica_wait_s: float = Field(
        30.0, ge=0, description="seconds that requests wait for a replica of a model that has lost its last one"
    )
    max_replicas_lost: int = Field(
        2, ge=1, description="replicas that may die in a row under one request before it is not tried again"
    )
    retry_burst: int = Field(1000, ge=1, description="lost requests that are sent again at once; more are paced")
    retries_per_s: float = Field(20.0, gt=0, description="lost requests that are sent again a second, at least")
    retry_share: float = Field(0.2, ge=0, description="lost requests that are sent again for each new request")
    connect_timeout_s: float = Field(5.0, gt=0, description="seconds until a replica must have said hello")
    max_reconnect_s: float = Field(2.0, gt=0, description="longest pause between two attempts to reach a replica")
    keepalive_s: float = Field(3.0, gt=0, description="seconds of silence after which a peer is pinged")
    keepalive_timeout_s: float = Field(3.0, gt=0, description="seconds that a pinged peer has to answer")
    inline_tokenize_bytes: Bytes = Field(
        2**10, ge=0, description="texts up to this size are tokenized on the event loop, larger ones on a thread"
    )
    reuse_port: bool = Field(False, description="let several routers of one host share a port")
