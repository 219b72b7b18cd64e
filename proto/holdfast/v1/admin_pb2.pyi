from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("model", "refuse")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    model: str
    refuse: bool
    def __init__(self, model: _Optional[str] = ..., refuse: bool = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "model", "replace", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    replace: bool
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ..., replace: bool = ..., pinned: bool = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins", "unheard")
    PINS_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    unheard: _containers.RepeatedCompositeFieldContainer[UnheardReplica]
    def __init__(self, pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ..., unheard: _Optional[_Iterable[_Union[UnheardReplica, _Mapping]]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("replica_id", "model", "tenant", "prefix", "num_tokens", "seconds_left", "is_on_disk")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    IS_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    model: str
    tenant: str
    prefix: str
    num_tokens: int
    seconds_left: float
    is_on_disk: bool
    def __init__(self, replica_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., prefix: _Optional[str] = ..., num_tokens: _Optional[int] = ..., seconds_left: _Optional[float] = ..., is_on_disk: bool = ...) -> None: ...

class UnheardReplica(_message.Message):
    __slots__ = ("replica_id", "reason")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    reason: str
    def __init__(self, replica_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("tenant", "prefix")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    prefix: str
    def __init__(self, tenant: _Optional[str] = ..., prefix: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("num_blocks", "unheard")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    unheard: _containers.RepeatedCompositeFieldContainer[UnheardReplica]
    def __init__(self, num_blocks: _Optional[int] = ..., unheard: _Optional[_Iterable[_Union[UnheardReplica, _Mapping]]] = ...) -> None: ...

class DumpStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpStateResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ListClusterModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListClusterModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ClusterModel]
    def __init__(self, models: _Optional[_Iterable[_Union[ClusterModel, _Mapping]]] = ...) -> None: ...

class ClusterModel(_message.Message):
    __slots__ = ("name", "status", "num_replicas", "engines", "versions", "num_on_full_disks", "activity", "settings", "adapters", "pinned_adapters")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_ON_FULL_DISKS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PINNED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    status: str
    num_replicas: int
    engines: _containers.RepeatedScalarFieldContainer[str]
    versions: _containers.ScalarMap[str, int]
    num_on_full_disks: int
    activity: str
    settings: str
    adapters: _containers.ScalarMap[str, str]
    pinned_adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., status: _Optional[str] = ..., num_replicas: _Optional[int] = ..., engines: _Optional[_Iterable[str]] = ..., versions: _Optional[_Mapping[str, int]] = ..., num_on_full_disks: _Optional[int] = ..., activity: _Optional[str] = ..., settings: _Optional[str] = ..., adapters: _Optional[_Mapping[str, str]] = ..., pinned_adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class ChangeModelRequest(_message.Message):
    __slots__ = ("add", "update", "rollback", "remove", "scale")
    ADD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    add: AddModel
    update: UpdateModel
    rollback: RollbackModel
    remove: RemoveModel
    scale: ScaleModel
    def __init__(self, add: _Optional[_Union[AddModel, _Mapping]] = ..., update: _Optional[_Union[UpdateModel, _Mapping]] = ..., rollback: _Optional[_Union[RollbackModel, _Mapping]] = ..., remove: _Optional[_Union[RemoveModel, _Mapping]] = ..., scale: _Optional[_Union[ScaleModel, _Mapping]] = ...) -> None: ...

class AddModel(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: str
    def __init__(self, settings: _Optional[str] = ...) -> None: ...

class UpdateModel(_message.Message):
    __slots__ = ("model", "settings", "canary_share", "canary_seconds", "min_requests")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CANARY_SHARE_FIELD_NUMBER: _ClassVar[int]
    CANARY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    settings: str
    canary_share: float
    canary_seconds: float
    min_requests: int
    def __init__(self, model: _Optional[str] = ..., settings: _Optional[str] = ..., canary_share: _Optional[float] = ..., canary_seconds: _Optional[float] = ..., min_requests: _Optional[int] = ...) -> None: ...

class RollbackModel(_message.Message):
    __slots__ = ("model", "drain_timeout_seconds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    drain_timeout_seconds: float
    def __init__(self, model: _Optional[str] = ..., drain_timeout_seconds: _Optional[float] = ...) -> None: ...

class RemoveModel(_message.Message):
    __slots__ = ("model", "drain_timeout_seconds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    drain_timeout_seconds: float
    def __init__(self, model: _Optional[str] = ..., drain_timeout_seconds: _Optional[float] = ...) -> None: ...

class ScaleModel(_message.Message):
    __slots__ = ("model", "num_replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_replicas: int
    def __init__(self, model: _Optional[str] = ..., num_replicas: _Optional[int] = ...) -> None: ...

class ChangeModelResponse(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: ModelChangeProgress
    result: ModelChangeResult
    def __init__(self, progress: _Optional[_Union[ModelChangeProgress, _Mapping]] = ..., result: _Optional[_Union[ModelChangeResult, _Mapping]] = ...) -> None: ...

class ModelChangeProgress(_message.Message):
    __slots__ = ("phase", "done", "total")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    phase: str
    done: int
    total: int
    def __init__(self, phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class ModelChangeResult(_message.Message):
    __slots__ = ("model", "num_replicas", "old_version", "new_version", "removed_applications")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    OLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_APPLICATIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_replicas: int
    old_version: str
    new_version: str
    removed_applications: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., num_replicas: _Optional[int] = ..., old_version: _Optional[str] = ..., new_version: _Optional[str] = ..., removed_applications: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadLogsRequest(_message.Message):
    __slots__ = ("process", "num_lines", "follow")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NUM_LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    process: str
    num_lines: int
    follow: bool
    def __init__(self, process: _Optional[str] = ..., num_lines: _Optional[int] = ..., follow: bool = ...) -> None: ...

class ReadLogsResponse(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("process", "text")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    process: str
    text: str
    def __init__(self, process: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
