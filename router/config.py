"""Router configuration: validated, frozen settings in four groups. `cluster/config/` loads them."""

from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from holdfast.router.config_types import File, HostNames, Origins, RuleNames, parse_store
from holdfast.worker.parameters import MAX_LOGPROBS
from holdfast.worker.settings import MAX_WHOLE, Bytes, Settings

PolicyName = Literal["prefix_aware", "session_affinity", "power_of_two", "least_loaded", "round_robin", "random"]
"""The routing policies, which are in `dispatch/policy.py`."""

PREFIX_POLICIES: Final[frozenset[PolicyName]] = frozenset({"prefix_aware"})
"""Routing policies that read `RoutingSnapshot.prefix`: only for these do replicas report their cached blocks."""

MAX_KEEPALIVE_S: Final = 2_000_000
"""Maximum seconds of gRPC's keepalive, which are 32 bits of milliseconds."""


class LimitsConfig(Settings):
    """Limits on requests."""

    max_queued: int = Field(
        1024,
        ge=0,
        description="maximum requests that wait in one router for a replica; above it, only tenants below their share "
        "may add requests",
    )
    default_timeout_s: float = Field(600.0, gt=0, description="timeout of a request that sets none, in seconds")
    max_timeout_s: float = Field(3600.0, gt=0, description="longest timeout that a request may set, in seconds")
    max_prompt_bytes: Bytes = Field(
        512 * 2**10, ge=1, le=MAX_WHOLE, description="maximum bytes of a prompt's text, in UTF-8"
    )
    max_prompt_tokens: int = Field(
        2**20, ge=1, description="maximum token ids of a prompt, of a resume record, or of a call to Detokenize"
    )
    max_messages: int = Field(
        4096, ge=1, description="maximum messages of a chat, and maximum tool calls in all its messages"
    )
    max_tools: int = Field(1024, ge=0, description="maximum tools of a chat")
    max_message_bytes: Bytes = Field(
        8 * 2**20, ge=2**20, le=MAX_WHOLE, description="maximum bytes of a gRPC message or an HTTP body"
    )
    max_header_bytes: Bytes = Field(
        32 * 2**10,
        ge=2**12,
        le=MAX_WHOLE,
        description="maximum bytes of a request's headers or metadata, over HTTP and gRPC",
    )
    max_connections: int = Field(4096, ge=1, description="maximum open connections of each port of a router")
    max_unauthenticated_connections: int = Field(
        512,
        ge=1,
        description="maximum open connections that have not yet sent a valid key, where keys are required; above it, "
        "the oldest are closed",
    )
    max_unauthenticated_calls_per_s: float = Field(
        100.0,
        gt=0,
        description="maximum calls per second without a valid key from one address, where keys are required; bursts of "
        "ten seconds' worth are allowed; above it connections are closed",
    )
    max_resets_per_s: float = Field(
        100.0,
        gt=0,
        description="maximum gRPC calls per second from one address that clients reset within a second; bursts of ten "
        "seconds' worth are allowed; above it connections with mostly such calls are closed",
    )
    receive_timeout_s: float = Field(120.0, gt=0, description="seconds within which an HTTP request must have arrived")
    slow_reader_s: float = Field(
        120.0,
        gt=0,
        description="seconds without reading after which a client's connection is closed; over gRPC, seconds after the "
        "request's timeout",
    )
    max_unread_tokens: int | None = Field(
        128,
        ge=1,
        description="maximum unread tokens of a stream; above it the request is suspended until its client has read; "
        "unset: unlimited",
    )
    max_request_id_length: int = Field(128, ge=32, description="maximum characters of a request id")
    max_stop_strings: int = Field(64, ge=0, description="maximum number of stop strings of one request")
    max_stop_string_length: int = Field(1024, ge=1, description="maximum characters of one stop string")
    max_bad_words: int = Field(256, ge=0, description="maximum number of bad words of one request")
    max_bad_word_length: int = Field(256, ge=1, description="maximum characters of one bad word")
    max_logprobs: int = Field(
        20, ge=0, le=MAX_LOGPROBS, description="maximum logprobs and prompt_logprobs of one request"
    )
    max_logit_bias: int = Field(4096, ge=0, description="maximum entries of logit_bias of one request")
    max_stop_token_ids: int = Field(4096, ge=0, description="maximum stop_token_ids of one request")
    max_allowed_token_ids: int = Field(2**19, ge=1, description="maximum allowed_token_ids of one request")
    max_choices: int = Field(4096, ge=1, description="maximum number of texts of a `choice`")
    max_sequences: int = Field(64, ge=1, description="maximum n or best_of of one request")
    max_open_per_tenant: int | None = Field(
        None,
        ge=1,
        description="maximum open requests of one tenant in one router; more are refused; default: unlimited",
    )
    max_grammar_length: int = Field(
        64 * 2**10,
        ge=0,
        description="maximum characters of a JSON schema, a regex, a grammar, or all choices of one request",
    )


class OverloadConfig(Settings):
    """Overload protection of a router: byte budgets, limits of resources, and pressures at which actions begin.

    A pressure is the used fraction of a limit: of memory, of the event loop's delay, of bytes, or of open requests.
    """

    max_memory: Bytes | None = Field(
        None,
        ge=2**26,
        description="resident memory of a router at which its pressure is 1; unset: half of the machine's or "
        "container's memory, but at most 4 GiB",
    )
    max_loop_delay_s: float = Field(
        1.0, gt=0, description="average delay of a router's event loop in seconds at which its pressure is 1"
    )
    max_open_requests: int = Field(32768, ge=1, description="open requests of a router at which its pressure is 1")
    max_connection_bytes: Bytes = Field(
        64 * 2**20, ge=2**20, description="maximum bytes of undecoded requests of one connection"
    )
    max_key_bytes: Bytes = Field(
        128 * 2**20,
        ge=2**20,
        description="maximum bytes of undecoded requests per API key, or per client address where keys are off",
    )
    max_router_bytes: Bytes = Field(
        256 * 2**20,
        ge=2**20,
        description="maximum bytes of undecoded requests and unread output of a router; its pressure is 1 here",
    )
    shrink_heap_at: float = Field(
        0.7, gt=0, le=1, description="memory pressure at which freed memory is returned to the system"
    )
    stop_accepting_at: float = Field(
        0.8,
        gt=0,
        le=1,
        description="pressure at which new connections serve only health checks, operators and resumed streams",
    )
    shed_low_at: float = Field(
        0.85, gt=0, le=1, description="pressure at which new requests of priority LOW are refused"
    )
    shed_new_at: float = Field(
        0.92, gt=0, le=1, description="pressure at which all new requests are refused; at 1 resumed ones too"
    )
    close_greediest_at: float = Field(
        0.97,
        gt=0,
        le=1,
        description="pressure of memory or bytes at which the request that holds the most bytes is ended",
    )
    release_margin: float = Field(
        0.1, ge=0, lt=1, description="hysteresis: an action ends when its pressure is this far below its start"
    )

    @model_validator(mode="after")
    def _check_order(self) -> "OverloadConfig":
        order = ("shrink_heap_at", "stop_accepting_at", "shed_low_at", "shed_new_at", "close_greediest_at")
        for first, second in pairwise(order):
            if getattr(self, first) > getattr(self, second):
                message = f"{first} = {getattr(self, first)} must be at most {second} = {getattr(self, second)}"
                raise ValueError(f"{message}: actions begin in this order")
        budgets = ("max_connection_bytes", "max_key_bytes", "max_router_bytes")
        for smaller, larger in pairwise(budgets):
            if getattr(self, smaller) > getattr(self, larger):
                message = f"{smaller} = {getattr(self, smaller)} must be at most {larger} = {getattr(self, larger)}"
                raise ValueError(f"{message}: one contains the other")
        return self


class SecurityConfig(Settings):
    """Authentication of callers, and encryption of ports and links. Files are read again when they change."""

    api_keys: File | None = Field(
        None, description="file of API keys, as `holdfast keys add` writes it; unset: no key is required"
    )
    insecure: bool = Field(False, description="allow addresses other than loopback without API keys")
    tls_cert: File | None = Field(None, description="certificate chain (PEM) of the gRPC and HTTP ports; unset: no TLS")
    tls_key: File | None = Field(None, description="private key of the certificate (PEM)")
    tls_client_ca: File | None = Field(
        None, description="CA of clients' certificates (PEM); unset: clients need no certificate"
    )
    cluster_token_file: File | None = Field(
        None, description="file with the secret token of routers and replicas; unset: one is generated"
    )
    link_cert: File | None = Field(
        None, description="certificate (PEM) for holdfast-link, of routers and replicas for their links; unset: no TLS"
    )
    link_key: File | None = Field(None, description="private key of the certificate (PEM)")
    link_ca: File | None = Field(None, description="CA of the certificates of links (PEM)")

    @model_validator(mode="after")
    def _check_files(self) -> "SecurityConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca must come with tls_cert and tls_key")
        if len({path is None for path in (self.link_cert, self.link_key, self.link_ca)}) > 1:
            raise ValueError("link_cert, link_key and link_ca must be set together")
        return self


class RouterConfig(Settings):
    """Routing, links to replicas, retries, and the router's own port."""

    # Prefix-aware by default: chats and shared system prompts are the common case. A prompt that is cached nowhere
    # costs one hash and is routed by power of two choices; on the wire, a cached block costs 8 bytes once.
    routing_policy: PolicyName = Field(
        "prefix_aware",
        description="routing policy; prefix_aware: the replica with the earliest expected end of prefill, given its "
        "cached prefixes",
    )
    model_routing_policies: dict[str, PolicyName] = Field(
        {}, description="routing policies by model name; overrides routing_policy"
    )
    prefill_replicas: int = Field(
        0,
        ge=0,
        description="replicas of each model that compute long prompts and then hand the requests over; 0: none",
    )
    max_prefill_replicas: int | None = Field(
        None,
        ge=1,
        description="maximum of such replicas: their number then follows the load of long prompts, from "
        "prefill_replicas on; unset: always prefill_replicas",
    )
    decode_replicas: int = Field(
        0,
        ge=0,
        description="replicas of each model that get no long prompts while other replicas can compute them",
    )
    prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="number of prompt tokens without a cached block on any decode replica from which a prompt counts "
        "as long; default: the number from which prefill on another replica plus the transfer is faster, by "
        "measured speeds",
    )
    max_waiting_per_replica: int = Field(
        64, ge=1, description="maximum waiting requests in one replica; more wait in the router"
    )
    max_ttft_s: float | None = Field(
        None,
        gt=0,
        description="refuse requests whose expected time to the first token exceeds this many seconds; unset: off",
    )
    replica_wait_s: float = Field(
        120.0,
        ge=0,
        description="seconds that requests wait for a replica when their model has none; Ray may take 60 until it "
        "replaces one that was lost while it started",
    )
    max_replicas_lost: int = Field(
        2, ge=1, description="consecutive crashes of replicas that run a request after which it is quarantined"
    )
    retry_burst: int = Field(1000, ge=1, description="retry budget: burst of retries after lost replicas")
    retries_per_s: float = Field(20.0, gt=0, description="retry budget: further retries per second")
    retry_share: float = Field(0.2, ge=0, description="retry budget: further retries per new request")
    connect_timeout_s: float = Field(5.0, gt=0, description="seconds within which a replica must answer a new link")
    max_reconnect_s: float = Field(
        2.0, gt=0, description="longest pause between two connection attempts to a replica, in seconds"
    )
    keepalive_s: float = Field(
        3.0,
        gt=0,
        le=MAX_KEEPALIVE_S,
        description="gRPC keepalive: seconds of silence after which the other end is pinged",
    )
    keepalive_timeout_s: float = Field(
        3.0, gt=0, le=MAX_KEEPALIVE_S, description="gRPC keepalive: seconds that the other end has to answer a ping"
    )
    inline_tokenize_bytes: Bytes = Field(
        2**10, ge=0, description="texts up to this size are tokenized on the event loop, larger ones on a thread"
    )
    max_connection_age_s: float | None = Field(
        None,
        gt=0,
        description="seconds after which a client's connection is closed, so that clients rebalance; default: never",
    )
    max_connection_age_grace_s: float | None = Field(
        None,
        gt=0,
        description="seconds that open calls of such a connection have to finish; default: unlimited",
    )
    max_concurrent_streams: int = Field(
        512,
        ge=1,
        le=2**31 - 1,
        description="maximum concurrent calls of one connection; more wait in the client, or are refused unstarted",
    )
    gzip_above: Bytes | None = Field(
        None,
        ge=1,
        description="size from which complete responses are gzipped for clients that accept gzip; default: never",
    )
    load_reports: bool = Field(
        True,
        description="report the router's load in an ORCA trailer of each call, for clients that balance by load",
    )
    endpoint_picker: bool = Field(
        False,
        description="serve Envoy's ext_proc, by which a gateway with an InferencePool asks for a request's router",
    )
    reuse_port: bool = Field(False, description="let several routers of one host share a port")
    http_allowed_hosts: HostNames = Field(
        (),
        description="without API keys: host names accepted in a request's Host and Origin headers besides loopback's, "
        "e.g. llm.example.org,localhost; unset: loopback's, or any name if the server listens on other addresses",
    )
    http_cors_origin: Origins = Field(
        (),
        description="origins of web pages that may call the HTTP API (CORS), e.g. https://app.example,"
        "http://localhost:3000, or * for any; unset: only the server's own origin",
    )
    store: Annotated[str, AfterValidator(parse_store)] | None = Field(
        None,
        description="store of responses, conversations, chats, files and batches: a folder (SQLite, for the routers of "
        "one host) or a URL like postgresql://user@host/database; unset: no store",
    )
    store_max_bytes: Bytes = Field(
        2**30, ge=2**20, description="maximum size of the store; above it, the oldest entries are deleted"
    )
    store_retention_s: float = Field(
        30 * 86400.0, gt=0, description="age in seconds at which entries of the store are deleted"
    )
    store_max_file_bytes: Bytes = Field(
        200 * 2**20, ge=2**10, description="maximum bytes of a file of /v1/files; files count toward store_max_bytes"
    )
    batch_concurrency: int = Field(
        32, ge=1, le=4096, description="maximum lines of batches that a router computes at a time, at low priority"
    )
    head_line_rules: RuleNames = Field(
        ("billing",),
        description="rules for lines of a chat's system prompt that change with each call and so defeat prefix "
        "caching, e.g. billing,date; billing lines are dropped, date, time and id lines are moved after the last "
        "message; none: no rule",
    )
    killable: bool = Field(
        False, description="for demonstrations and tests: operators may end a replica's process as `kill -9` does"
    )

    @model_validator(mode="after")
    def _check_roles(self) -> "RouterConfig":
        least, most = self.prefill_replicas, self.max_prefill_replicas
        if most is not None and most < least:
            raise ValueError(f"max_prefill_replicas = {most} must be at least prefill_replicas = {least}")
        return self

    def policy_of(self, model: str) -> PolicyName:
        """The routing policy of a model."""
        return self.model_routing_policies.get(model, self.routing_policy)

    @property
    def is_prefix_aware(self) -> bool:
        """Whether any model's routing policy considers the replicas' cached prefixes."""
        return not PREFIX_POLICIES.isdisjoint((self.routing_policy, *self.model_routing_policies.values()))
