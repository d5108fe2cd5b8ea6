from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LimitsOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIMITS_OUTCOME_UNSPECIFIED: _ClassVar[LimitsOutcome]
    APPLIED: _ClassVar[LimitsOutcome]
    DEFERRED: _ClassVar[LimitsOutcome]
    REJECTED: _ClassVar[LimitsOutcome]
LIMITS_OUTCOME_UNSPECIFIED: LimitsOutcome
APPLIED: LimitsOutcome
DEFERRED: LimitsOutcome
REJECTED: LimitsOutcome

class GetMemoryReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained", "running", "waiting")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    running: int
    waiting: int
    def __init__(self, drained: _Optional[bool] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_model_len", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "watermark", "long_prompt_tokens", "long_prompt_share", "long_queue_share")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LONG_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONG_PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    LONG_QUEUE_SHARE_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    long_prompt_tokens: int
    long_prompt_share: float
    long_queue_share: float
    def __init__(self, max_model_len: _Optional[int] = ..., gpu_memory_utilization: _Optional[float] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., watermark: _Optional[float] = ..., long_prompt_tokens: _Optional[int] = ..., long_prompt_share: _Optional[float] = ..., long_queue_share: _Optional[float] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("revision", "limits")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    limits: Limits
    def __init__(self, revision: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class SetLimitsResponse(_message.Message):
    __slots__ = ("outcome", "reason", "revision", "effective")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    outcome: LimitsOutcome
    reason: str
    revision: int
    effective: Limits
    def __init__(self, outcome: _Optional[_Union[LimitsOutcome, str]] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ..., effective: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class MemoryClass(_message.Message):
    __slots__ = ("name", "planned_bytes", "actual_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    planned_bytes: int
    actual_bytes: int
    def __init__(self, name: _Optional[str] = ..., planned_bytes: _Optional[int] = ..., actual_bytes: _Optional[int] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("engine_version", "model", "device", "dtype", "tensor_parallel_size", "started_at", "device_total_bytes", "device_free_bytes", "device_free_low_water_bytes", "classes", "block_size", "bytes_per_block", "committed_blocks", "usable_blocks", "used_blocks", "max_model_len_ceiling", "model_max_len", "largest_prompt_admissible", "limits", "limits_revision", "limits_outcome", "limits_reason", "running", "waiting", "preemptions", "allocation_failures_caught", "step_heartbeat_age_seconds")
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FREE_LOW_WATER_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_CEILING_FIELD_NUMBER: _ClassVar[int]
    MODEL_MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    LARGEST_PROMPT_ADMISSIBLE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_REVISION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_REASON_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_FAILURES_CAUGHT_FIELD_NUMBER: _ClassVar[int]
    STEP_HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    engine_version: str
    model: str
    device: str
    dtype: str
    tensor_parallel_size: int
    started_at: float
    device_total_bytes: int
    device_free_bytes: int
    device_free_low_water_bytes: int
    classes: _containers.RepeatedCompositeFieldContainer[MemoryClass]
    block_size: int
    bytes_per_block: int
    committed_blocks: int
    usable_blocks: int
    used_blocks: int
    max_model_len_ceiling: int
    model_max_len: int
    largest_prompt_admissible: int
    limits: Limits
    limits_revision: int
    limits_outcome: LimitsOutcome
    limits_reason: str
    running: int
    waiting: int
    preemptions: int
    allocation_failures_caught: int
    step_heartbeat_age_seconds: float
    def __init__(self, engine_version: _Optional[str] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., started_at: _Optional[float] = ..., device_total_bytes: _Optional[int] = ..., device_free_bytes: _Optional[int] = ..., device_free_low_water_bytes: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[MemoryClass, _Mapping]]] = ..., block_size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., committed_blocks: _Optional[int] = ..., usable_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., max_model_len_ceiling: _Optional[int] = ..., model_max_len: _Optional[int] = ..., largest_prompt_admissible: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., limits_revision: _Optional[int] = ..., limits_outcome: _Optional[_Union[LimitsOutcome, str]] = ..., limits_reason: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., preemptions: _Optional[int] = ..., allocation_failures_caught: _Optional[int] = ..., step_heartbeat_age_seconds: _Optional[float] = ...) -> None: ...
