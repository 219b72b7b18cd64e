"""Configuration tree of the system, and the only reader of environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.config.sources import environment_layer, file_layer, resolve
from holdfast.cluster.scaling.demand_book import ScalingConfig
from holdfast.router.config import LimitsConfig, OverloadConfig, RouterConfig, SecurityConfig
from holdfast.worker.config import (
    CacheConfig,
    HealthConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    TelemetryConfig,
    WorkerConfig,
)
from holdfast.worker.settings import Bytes, Settings

_OF_CLUSTER: Final = ("replicas", "cpus_per_rank", "rank_resources")
"""Settings of the section `cluster` that an entry may set."""


class ModelEntry(Settings):
    """One model of `cluster.models`. A setting that is not given here is that of all models."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    health: HealthConfig = HealthConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    scaling: ScalingConfig = ScalingConfig()
    replicas: int = Field(1, ge=1, description="number of replicas of this model")
    cpus_per_rank: float = Field(1.0, gt=0, description="as cluster.cpus_per_rank, for this model")
    rank_resources: dict[str, float] = Field({}, description="as cluster.rank_resources, for this model")

    def over(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of all models, as nested mappings, with this entry's own in their places."""
        given = self.model_dump(exclude_unset=True)
        own_cluster = {name: given.pop(name) for name in _OF_CLUSTER if name in given}
        merged = {section: dict(values) for section, values in settings.items()}
        for section, values in (given | {"cluster": own_cluster}).items():
            merged[section] |= values
        return merged


def read_models(value: object) -> object:
    """`"./a,./b"` as entries, and a name among entries as one. Other values are left to the validator."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return tuple({"model": {"model": entry}} if isinstance(entry, str) else entry for entry in value)
    return value


ModelEntries = Annotated[tuple[ModelEntry, ...], BeforeValidator(read_models)]


CONFIG_FILE_VARIABLE: Final = "HOLDFAST_CONFIG"
"""Variable that names the configuration file if there is no `--config`."""

API_KEY_VARIABLE: Final = "HOLDFAST_API_KEY"
"""Variable that sets `client.api_key`."""

BUILT_IN_RESOURCES: Final = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources for which Ray has separate arguments; they cannot be custom resources."""

MIN_AMOUNT: Final = 0.0001
"""Minimum amount of a custom resource; Ray counts in units of 1/10,000."""


def _read_resources(value: object) -> object:
    """`"fast_disk=1,accelerator_type:H100=0.001"` as a mapping. Other values are left to the validator."""
    if not isinstance(value, str):
        return value
    pairs = [pair.rpartition("=") for pair in value.split(",") if pair.strip()]
    if not all(name.strip() for name, _, _ in pairs):
        raise ValueError(f"{value!r} names no resources; write it like fast_disk=1,accelerator_type:H100=0.001")
    return {name.strip(): amount for name, _, amount in pairs}


def _check_resources(value: Mapping[str, float]) -> Mapping[str, float]:
    for name in value:
        if name in BUILT_IN_RESOURCES:
            raise ValueError(f"{name} is not a custom resource: name those of `ray start --resources`")
    return value


Amount = Annotated[float, Field(ge=MIN_AMOUNT, allow_inf_nan=False)]
CustomResources = Annotated[dict[str, Amount], BeforeValidator(_read_resources), AfterValidator(_check_resources)]
"""Amounts by name, as in `ray start --resources`. Ray adds further resources, such as `accelerator_type:H100`."""


def _read_labels(value: object) -> object:
    """`"pool=chat,zone=!a"` as a mapping. Other values are left to the validator."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError(f"{value!r} names no labels; write it like pool=chat,zone=!a")
    return {name.strip(): wanted.strip() for name, _, wanted in pairs}


LabelSelector = Annotated[dict[str, str], BeforeValidator(_read_labels)]
"""Labels a node must have, as `ray start --labels` gave them: a value, `!value`, in a mapping also `in(a,b)`."""


def _shifted(port: int | None, number: int) -> int | None:
    """The port of router `number`: `port` + `number`; 0 (a free port) and None are the same for all routers."""
    return port + number if port else port


class ClusterConfig(Settings):
    """Settings of the cluster: numbers of replicas and routers, addresses, resources, Ray."""

    replicas: int = Field(1, ge=1, description="number of replicas of each model")
    models: ModelEntries = Field(
        (),
        description="several models: a list of names, or in a file a list of each model's settings; unset: "
        "`model.model`",
    )
    routers: int = Field(2, ge=1, description="number of routers; on one machine each has its own port")
    host: str | None = Field(
        None, description="address that routers listen on; unset: loopback, or 0.0.0.0 with `address`"
    )
    port: int = Field(50051, ge=0, le=65535, description="gRPC port of the first router; 0: free ports for all routers")
    http_port: int | None = Field(
        8000, ge=0, le=65535, description="HTTP port of the first router; 0: a free port, none: no HTTP"
    )
    http_front_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of an HTTP proxy before all routers of this machine, through which streams of any client "
        "survive the loss of a router; 0: a free port, none: no proxy",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of gRPC's channelz on the first router, on loopback; 0: a free port, none: no channelz",
    )
    engine_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of vLLM's engine protocol on a machine's first replica; further replicas take the following "
        "ports; 0: free ports, none: not served",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of Prometheus metrics on a machine's first replica; further replicas take the following "
        "ports; 0: free ports, none: only routers export the metrics of replicas",
    )
    address: str | None = Field(
        None, description="an existing Ray cluster to join (`auto` or host:port); unset: start one"
    )
    namespace: str = Field("holdfast", min_length=1, description="Ray namespace and name of the Serve application")
    cpus_per_rank: float = Field(1.0, gt=0, description="CPUs that Ray reserves for each rank")
    rank_resources: CustomResources = Field(
        {}, description="custom Ray resources of each rank, besides CPU and GPU, e.g. accelerator_type:H100=0.001"
    )
    router_resources: CustomResources = Field(
        {}, description="custom Ray resources of each router, besides one CPU, e.g. front_door=1"
    )
    rank_labels: LabelSelector = Field(
        {},
        description="labels that a node must have for ranks to run there, e.g. pool=chat; values in Ray's selector "
        "syntax",
    )
    router_labels: LabelSelector = Field(
        {}, description="labels that a node must have for routers to run there, e.g. pool=routers"
    )
    span_nodes: bool = Field(
        False,
        description="allow ranks of one replica on several nodes where no node has room for all of them; slow links "
        "between nodes slow down every step",
    )
    domain_label: str | None = Field(
        None,
        min_length=1,
        description="with `span_nodes`, a node label of the domains with fast links, such as NVLink domains; the ranks "
        "of a replica go to one domain if one has room",
    )
    object_store_memory: Bytes = Field(
        100 * 2**20,
        ge=80 * 2**20,
        description="size of the object store of a Ray that is started here; no token is stored there",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        description="seconds that open requests have to finish when the cluster, a router or a replica stops",
    )

    @model_validator(mode="after")
    def _check_domain(self) -> "ClusterConfig":
        if self.domain_label is not None and not self.span_nodes:
            raise ValueError("domain_label needs span_nodes: without it, all ranks of a replica are on one node")
        if self.domain_label in self.rank_labels:
            raise ValueError(
                f"domain_label = {self.domain_label!r}: must not be in rank_labels, which already selects its value"
            )
        return self

    @model_validator(mode="after")
    def _check_front(self) -> "ClusterConfig":
        if self.http_front_port is not None and not (self.http_port and self.port):
            raise ValueError(
                "http_front_port needs a fixed port and http_port: a router that replaces another one takes over its "
                "ports"
            )
        if self.http_front_port is not None and self.address is not None:
            raise ValueError("http_front_port is for a cluster of this machine; beside others run `holdfast front`")
        return self

    @property
    def router_ports(self) -> list[tuple[int, int | None, int | None]]:
        """The gRPC, HTTP and admin ports that routers of one machine try in turn; 0 stands for any free one."""
        if not self.port:
            return [(0, None if self.http_port is None else 0, None if self.admin_port is None else 0)]
        return [
            (self.port + number, _shifted(self.http_port, number), _shifted(self.admin_port, number))
            for number in range(self.routers)
        ]


class ClientConfig(Settings):
    """Settings of commands that call a server."""

    api_key: SecretStr | None = Field(
        None, description=f"API key of calls; not a flag, because process lists show flags: {API_KEY_VARIABLE}"
    )
    server_ca: Path | None = Field(None, description="CA of the server's certificate (PEM); turns TLS on")
    client_cert: Path | None = Field(None, description="client certificate (PEM) for a server that requires one")
    client_key: Path | None = Field(None, description="private key of the certificate (PEM)")

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Client` and `AsyncClient`."""
        key = "" if self.api_key is None else self.api_key.get_secret_value()
        if self.server_ca is None and self.client_cert is None:
            return {"api_key": key}
        from holdfast.worker.wire.tls import Tls

        return {"api_key": key, "tls": Tls(ca=self.server_ca, cert=self.client_cert, key=self.client_key)}

    @model_validator(mode="after")
    def _check_files(self) -> "ClientConfig":
        if (self.client_cert is None) != (self.client_key is None):
            raise ValueError("client_cert and client_key must be set together")
        return self


class HoldfastConfig(Settings):
    """Every setting of the system, one group per owner."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    health: HealthConfig = HealthConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    router: RouterConfig = RouterConfig()
    limits: LimitsConfig = LimitsConfig()
    overload: OverloadConfig = OverloadConfig()
    security: SecurityConfig = SecurityConfig()
    client: ClientConfig = ClientConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()

    @model_validator(mode="after")
    def _check_names(self) -> "HoldfastConfig":
        each = self.each_model
        names = [one.model.name for one in each]
        for one in each:
            if names.count(one.model.name) > 1:
                named = f"two models are named {one.model.name!r}; give one a model.served_model_name"
                raise ValueError(f"cluster.models: {named}")
            if not one.scaling.is_on and one.scaling.min_replicas != 1:
                message = f"scaling.min_replicas = {one.scaling.min_replicas} of model {one.model.name!r}"
                raise ValueError(f"{message} needs scaling.max_replicas, which is not set")
            if one.scaling.max_replicas is not None and one.cluster.replicas > one.scaling.max_replicas:
                message = f"must be at most scaling.max_replicas = {one.scaling.max_replicas}"
                raise ValueError(f"cluster.replicas = {one.cluster.replicas} of model {one.model.name!r} {message}")
        return self

    @property
    def first_replicas(self) -> int:
        """Initial number of replicas; at least 1, since routers learn of a model from a replica."""
        return max(self.cluster.replicas, self.scaling.min_replicas) if self.scaling.is_on else self.cluster.replicas

    @property
    def most_replicas(self) -> int:
        """Maximum number of replicas of the model."""
        return self.scaling.max_replicas or self.cluster.replicas

    @property
    def each_model(self) -> tuple["HoldfastConfig", ...]:
        """The settings of each model that is served, without the others."""
        if not self.cluster.models:
            return (self,)
        shared = self.model_dump()
        shared["cluster"].pop("models")
        return tuple(HoldfastConfig.model_validate(entry.over(shared)) for entry in self.cluster.models)

    @property
    def worker(self) -> WorkerConfig:
        """The part that one replica needs."""
        return WorkerConfig(
            model=self.model,
            parallel=self.parallel,
            cache=self.cache,
            scheduler=self.scheduler,
            health=self.health,
            speculation=self.speculation,
            telemetry=self.telemetry,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """Validated settings, and the source of each value by its dotted path."""

    config: HoldfastConfig
    sources: Mapping[str, str]


def is_given(loaded: LoadedConfig, path: str) -> bool:
    """Whether a setting comes from a source, and not from its default."""
    return loaded.sources.get(path, "default") != "default"


def load_config(
    flags: Layer | None = None, file: str | Path | None = None, environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Reads all sources; `environ` is the process's own unless given.

    Raises `ConfigurationError` with the name, value and source of a wrong setting.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get(CONFIG_FILE_VARIABLE) or None
    layers: list[Layer] = [] if file is None else [file_layer(HoldfastConfig, Path(file))]
    if environ.get(API_KEY_VARIABLE):
        layers.append({"client.api_key": Setting(environ[API_KEY_VARIABLE], API_KEY_VARIABLE)})
    layers += [environment_layer(HoldfastConfig, environ), flags or {}]
    config, sources = resolve(HoldfastConfig, layers)
    return LoadedConfig(config=config, sources=sources)
