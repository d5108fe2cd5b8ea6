"""An LLMDeployment as frozen values, with every default filled in.

In: the object as the API server returned it (the schema and its CEL rules already hold).
Out: a :class:`Deployment`. Knows no cluster; the defaults here are the ones that the CRD's
descriptions promise, and they are never written back to the object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

from plimsoll_operator import names
from plimsoll_operator.quantities import parse_quantity

Json = dict[str, Any]

DEFAULT_ACCELERATOR = "nvidia.com/gpu"
DEFAULT_GPU_MEMORY_UTILIZATION = 0.90
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_BLOCK_SIZE = 16
# The extension's own endpoint picker listens there.
DEFAULT_PICKER_PORT = 9002
# Weights of hundreds of gigabytes take long; an engine that cannot start exits by itself.
DEFAULT_STARTUP_SECONDS = 3600.0


class InvalidSpec(ValueError):
    """A value that the schema lets through but no pod can be built from."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value}; allowed: {allowed}")
        self.field = field


class RuntimeName(StrEnum):
    PLIMSOLL = "Plimsoll"
    VLLM = "VLLM"


class ModelSource(StrEnum):
    HUB = "hf"
    CLAIM = "pvc"
    IMAGE = "oci"
    FILE = "file"


class TuningMode(StrEnum):
    OFF = "Off"
    ADVISE = "Advise"
    INITIAL = "Initial"
    AUTO = "Auto"
    HOLD = "Hold"


class RolloutType(StrEnum):
    AUTO = "Auto"
    DELETE_FIRST = "DeleteFirst"
    SURGE_FIRST = "SurgeFirst"


class CanaryMode(StrEnum):
    """What the first replica of a new template has to do before the others follow."""

    PROBE = "Probe"
    SOAK = "Soak"
    OFF = "Off"


@dataclass(frozen=True)
class KeyRef:
    """One key of a Secret in the deployment's namespace."""

    name: str
    key: str


@dataclass(frozen=True)
class Cache:
    """At most one of ``claim`` and ``host_path``; neither: each pod has its own. ``prefetch``: a Job
    fills the claim first; ``compiled``: what engines compile is kept there too."""

    claim: str | None = None
    host_path: str | None = None
    prefetch: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Model:
    """``location`` is what the engine is told: ``org/name`` or a path in the container."""

    uri: str
    source: ModelSource
    location: str
    claim: str | None
    revision: str | None
    served_name: str
    token: KeyRef | None
    cache: Cache = Cache()
    # The image that holds the weights.
    image: str | None = None
    # Seconds until an engine that still loads counts as hung.
    startup_timeout: float = DEFAULT_STARTUP_SECONDS


T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Bounds(Generic[T]):
    min_allowed: T | None = None
    max_allowed: T | None = None


@dataclass(frozen=True)
class Engine:
    """Where the engine's settings start; lengths in tokens, None = the largest that fits."""

    block_size: int
    gpu_memory_utilization: float
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    extra_args: tuple[str, ...]
    # Whether the spec itself names the block size: where it does not, another engine may choose.
    names_block_size: bool = False


@dataclass(frozen=True)
class Tuning:
    """``max_model_len`` None means that the length is never touched."""

    mode: TuningMode
    gpu_memory_utilization: Bounds[float]
    max_model_len: Bounds[int] | None
    max_restarts_per_day: int
    time_to_first_token: float
    time_per_output_token: float


@dataclass(frozen=True)
class EndpointPicker:
    """A Service in the deployment's namespace; ``failure_mode`` is InferencePool's own word."""

    name: str
    port: int
    failure_mode: str


@dataclass(frozen=True)
class PodTemplate:
    """Passed through to the pods; nested values are Kubernetes' own structures."""

    labels: Json
    annotations: Json
    fields: Json
    security_context: Json
    container_security_context: Json
    env: tuple[Json, ...]
    # A part of a PodSpec that is merged over the whole pod.
    patch: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Deployment:
    """Durations in seconds."""

    name: str
    namespace: str
    uid: str
    generation: int
    model: Model
    image: str | None
    image_pull_policy: str | None
    replicas: int
    tensor_parallel_size: int
    accelerator: str | None
    engine: Engine
    tuning: Tuning
    soak: float
    progress_deadline: float
    drain: float
    limits: Json
    requests: Json
    pod_template: PodTemplate
    api_key: KeyRef | None
    scrape_interval: float
    runtime: RuntimeName = RuntimeName.PLIMSOLL
    # As the spec has it; None: the image's tag may say it.
    runtime_version: str | None = None
    # Size of /dev/shm, a quantity; None: where one is needed, without a bound of its own.
    shared_memory: str | None = None
    rollout_type: RolloutType = RolloutType.AUTO
    canary: CanaryMode = CanaryMode.PROBE
    pipeline_parallel_size: int = 1
    # Pods that hold one replica's ranks together; 1: each pod is a replica.
    nodes: int = 1
    # None: the engines are in no InferencePool.
    endpoint_picker: EndpointPicker | None = None

    @property
    def in_groups(self) -> bool:
        return self.nodes > 1

    @property
    def ranks_per_pod(self) -> int:
        """And accelerators."""
        return self.tensor_parallel_size * self.pipeline_parallel_size // self.nodes

    @property
    def on_cpu(self) -> bool:
        return self.accelerator is None

    @property
    def ceiling(self) -> int | None:
        """Longest request ever accepted, in tokens; None = what the engine finds to fit."""
        bounds = self.tuning.max_model_len or Bounds[int]()
        lengths = (self.engine.max_model_len, bounds.max_allowed)
        return max((length for length in lengths if length is not None), default=None)

    @classmethod
    def parse(cls, resource: Json) -> Self:
        """Reads one LLMDeployment. Raises InvalidSpec naming field, value and what is allowed."""
        metadata, spec = resource["metadata"], resource["spec"]
        accelerator = spec.get("accelerator", {}).get("resourceName", DEFAULT_ACCELERATOR)
        rollout, resources = spec.get("rollout", {}), spec.get("resources", {})
        parallelism = spec.get("parallelism", {})
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            model=_model(metadata["name"], spec["model"]),
            image=spec.get("runtime", {}).get("image"),
            image_pull_policy=spec.get("runtime", {}).get("imagePullPolicy"),
            replicas=spec.get("replicas", 1),
            tensor_parallel_size=parallelism.get("tensor", 1),
            accelerator=accelerator or None,
            engine=_engine(spec.get("engine", {})),
            tuning=_tuning(spec.get("tuning", {})),
            soak=parse_duration("spec.rollout.soak", rollout.get("soak", "0s")),
            progress_deadline=parse_duration(
                "spec.rollout.progressDeadline", rollout.get("progressDeadline", "30m")
            ),
            drain=parse_duration("spec.drain", spec.get("drain", "60s")),
            limits=resources.get("limits", {}),
            requests=resources.get("requests", {}),
            pod_template=_pod_template(spec.get("podTemplate", {})),
            api_key=_key_ref(spec.get("apiKeySecretRef")),
            scrape_interval=parse_duration(
                "spec.monitoring.scrapeInterval",
                spec.get("monitoring", {}).get("scrapeInterval", "5s"),
            ),
            runtime=RuntimeName(spec.get("runtime", {}).get("name", RuntimeName.PLIMSOLL)),
            runtime_version=spec.get("runtime", {}).get("version"),
            shared_memory=_shared_memory(resources),
            rollout_type=RolloutType(rollout.get("type", RolloutType.AUTO)),
            canary=CanaryMode(rollout.get("canary", CanaryMode.PROBE)),
            pipeline_parallel_size=parallelism.get("pipeline", 1),
            nodes=parallelism.get("nodes", 1),
            endpoint_picker=_endpoint_picker(spec.get("inferencePool")),
        )


def _model(deployment: str, model: Json) -> Model:
    uri = model["uri"]
    scheme, _, rest = uri.partition("://")
    allowed = "hf://org/name, pvc://claim/path, oci://registry/name:tag, file:///path"
    if scheme not in tuple(ModelSource) or not rest:
        raise InvalidSpec("spec.model.uri", uri, allowed)
    source, claim, image, location = ModelSource(scheme), None, None, rest
    if source is ModelSource.IMAGE:
        image, location = rest, f"{names.MODEL_DIR}/{model.get('path', '')}".rstrip("/")
    if source is ModelSource.CLAIM:
        claim, _, path = rest.partition("/")
        if not path:
            raise InvalidSpec("spec.model.uri", uri, allowed)
        location = f"{names.MODEL_DIR}/{path}"
    default_name = location if source is ModelSource.HUB else deployment
    cache = model.get("cache", {})
    return Model(
        uri=uri,
        source=source,
        location=location,
        claim=claim,
        revision=model.get("revision"),
        served_name=model.get("servedName", default_name),
        token=_key_ref(model.get("tokenSecretRef")),
        cache=Cache(
            claim=cache.get("claimName"),
            host_path=cache.get("hostPath"),
            prefetch=cache.get("prefetch", False),
            compiled=cache.get("compiled", False),
        ),
        image=image,
        startup_timeout=parse_duration(
            "spec.model.startupTimeout",
            model.get("startupTimeout", f"{DEFAULT_STARTUP_SECONDS:g}s"),
        ),
    )


def _engine(engine: Json) -> Engine:
    return Engine(
        block_size=engine.get("blockSize", DEFAULT_BLOCK_SIZE),
        gpu_memory_utilization=float(
            engine.get("gpuMemoryUtilization", DEFAULT_GPU_MEMORY_UTILIZATION)
        ),
        max_model_len=engine.get("maxModelLen"),
        max_num_seqs=engine.get("maxNumSeqs", DEFAULT_MAX_NUM_SEQS),
        max_num_batched_tokens=engine.get("maxNumBatchedTokens", DEFAULT_MAX_NUM_BATCHED_TOKENS),
        extra_args=tuple(engine.get("extraArgs", ())),
        names_block_size="blockSize" in engine,
    )


def _tuning(tuning: Json) -> Tuning:
    utilization, objectives = tuning.get("gpuMemoryUtilization", {}), tuning.get("objectives", {})
    length = tuning.get("maxModelLen")
    return Tuning(
        mode=TuningMode(tuning.get("mode", TuningMode.AUTO)),
        gpu_memory_utilization=Bounds(utilization.get("minAllowed"), utilization.get("maxAllowed")),
        max_model_len=None
        if length is None
        else Bounds(length.get("minAllowed"), length.get("maxAllowed")),
        max_restarts_per_day=tuning.get("maxRestartsPerDay", 4),
        time_to_first_token=parse_duration(
            "spec.tuning.objectives.timeToFirstToken", objectives.get("timeToFirstToken", "2s")
        ),
        time_per_output_token=parse_duration(
            "spec.tuning.objectives.timePerOutputToken",
            objectives.get("timePerOutputToken", "200ms"),
        ),
    )


PASSED_THROUGH = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "serviceAccountName",
    "runtimeClassName",
    "imagePullSecrets",
)


def _pod_template(template: Json) -> PodTemplate:
    return PodTemplate(
        labels=template.get("labels", {}),
        annotations=template.get("annotations", {}),
        fields={field: template[field] for field in PASSED_THROUGH if field in template},
        security_context=template.get("securityContext", {}),
        container_security_context=template.get("containerSecurityContext", {}),
        env=tuple(template.get("env", ())),
        patch=template.get("patch", {}),
    )


def _endpoint_picker(pool: Json | None) -> EndpointPicker | None:
    if pool is None:
        return None
    reference = pool["endpointPickerRef"]
    return EndpointPicker(
        reference["name"],
        reference.get("port", DEFAULT_PICKER_PORT),
        reference.get("failureMode", "FailClose"),
    )


def _shared_memory(resources: Json) -> str | None:
    """/dev/shm is memory of the container: what is as large as its limit would end it."""
    size, limit = resources.get("sharedMemory"), resources.get("limits", {}).get("memory")
    if size is None or limit is None:
        return size
    wanted, allowed = parse_quantity(size), parse_quantity(limit)
    if wanted is not None and allowed is not None and wanted >= allowed:
        raise InvalidSpec(
            "spec.resources.sharedMemory", size, f"less than spec.resources.limits.memory ({limit})"
        )
    return str(size)


def _key_ref(reference: Json | None) -> KeyRef | None:
    return None if reference is None else KeyRef(reference["name"], reference["key"])


_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")


def parse_duration(field: str, text: str) -> float:
    """Go's duration form: one or more numbers with a unit, such as 1m30s."""
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise InvalidSpec(field, text, "a duration such as 60s, 1m30s or 500ms")
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION.findall(text))
