"""What was learned of one model on one kind of device: the MemoryProfile.

In: a deployment, or a MemoryProfile as read. Out: the profile's key and object, or what it says.
The key holds whatever changes how much memory is needed at a given utilisation; nobody owns the
object, so it outlives its deployment, and deleting it resets what was learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from plimsoll_operator import names, shape
from plimsoll_operator.shape import read_time
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.histogram import EMPTY, HIGHEST_BUCKET, Histogram
from plimsoll_operator.tuning.record import write_time
from plimsoll_operator.tuning.values import Blocked, FailureClass, Learned, Peaks

Json = dict[str, Any]

# Node labels that name the device, as NVIDIA's and AMD's device discovery set them.
_PRODUCT_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name")

# The CRD allows 64; the tuner adds to them.
_BLOCKED_READ = 32
_BLOCKED_SHAPE = shape.record(
    {
        "gpuMemoryUtilization": shape.share,
        "retreat": shape.share,
        "time": shape.time,
        "class": shape.word(FailureClass),
        "count": shape.positive,
    },
    required=("gpuMemoryUtilization", "retreat", "time", "class"),
)
_HISTOGRAM_SHAPE = shape.record(
    {"time": shape.time, "weights": shape.map_of(shape.number)}, required=("time", "weights")
)
_PEAKS = tuple(each.name for each in fields(Peaks))
_STATUS_SHAPE = shape.record(
    {
        "peaks": shape.record(dict.fromkeys(_PEAKS, _HISTOGRAM_SHAPE)),
        "blocked": shape.list_of(_BLOCKED_SHAPE),
        "lastKnownGood": shape.share,
        "lastOOMTime": shape.time,
        "overrun": shape.share,
        "overrunTime": shape.time,
    }
)


@dataclass(frozen=True)
class ProfileKey:
    """``device`` is ``cpu`` with the container's memory limit (there the limit is the device), or
    the resource's name with the product that the pods are bound to."""

    model: str
    revision: str
    dtype: str
    device: str
    tensor_parallel_size: int
    engine: str

    @property
    def text(self) -> str:
        return "/".join(
            (
                self.model.partition("://")[2],
                self.revision,
                self.dtype,
                self.device,
                f"tp{self.tensor_parallel_size}",
                self.engine,
            )
        )

    @property
    def name(self) -> str:
        return names.memory_profile(self.text)


def profile_key(deployment: Deployment, engine_image: str) -> ProfileKey:
    """``engine_image`` is the image that the pods run, by whoever chose it."""
    selector = deployment.pod_template.fields.get("nodeSelector", {})
    product = next((selector[label] for label in _PRODUCT_LABELS if label in selector), None)
    if deployment.accelerator is None:
        device = f"cpu {deployment.limits.get('memory', 'unlimited')}"
    else:
        device = f"{deployment.accelerator} {product}" if product else deployment.accelerator
    return ProfileKey(
        model=deployment.model.uri,
        revision=deployment.model.revision or "main",
        dtype=_flag(deployment.engine.extra_args, "--dtype") or "auto",
        device=device,
        tensor_parallel_size=deployment.tensor_parallel_size,
        engine=engine_image,
    )


def _flag(arguments: tuple[str, ...], flag: str) -> str | None:
    """The last value of ``flag``, written ``--flag=value`` or as two arguments."""
    value = None
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
        elif argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
    return value


def build_profile(namespace: str, key: ProfileKey) -> Json:
    """The object without its status; its spec never changes."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.PROFILE_KIND,
        "metadata": {
            "name": key.name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "plimsoll"},
        },
        "spec": {
            "model": key.model,
            "revision": key.revision,
            "dtype": key.dtype,
            "device": key.device,
            "tensorParallelSize": key.tensor_parallel_size,
            "engine": key.engine,
        },
    }


def build_profile_status(learned: Learned) -> Json:
    status: Json = {
        "blocked": [
            {
                "gpuMemoryUtilization": blocked.utilization,
                "retreat": blocked.retreat,
                "time": write_time(blocked.at),
                "class": blocked.failure_class.value,
                "count": blocked.count,
            }
            for blocked in learned.blocked
        ],
        "lastKnownGood": learned.last_known_good,
        "lastOOMTime": write_time(learned.last_oom_at),
        "overrun": learned.overrun,
        "overrunTime": write_time(learned.overrun_at),
        "peaks": {
            name: _write_histogram(histogram)
            for name in _PEAKS
            if (histogram := getattr(learned.peaks, name)) != EMPTY
        },
    }
    return {key: value for key, value in status.items() if value not in (None, [], {})}


def read_learned(profile: Mapping[str, Any] | None) -> Learned:
    """Nothing, when there is no profile; what cannot be read is left out, each entry by itself."""
    status = _STATUS_SHAPE((profile or {}).get("status")) or {}
    blocked = (_read_blocked(entry) for entry in status.get("blocked", ()))
    latest = sorted(blocked, key=lambda entry: entry.at)[-_BLOCKED_READ:]
    return Learned(
        blocked=tuple(sorted(latest, key=lambda entry: entry.utilization)),
        last_known_good=status.get("lastKnownGood"),
        last_oom_at=read_time(status.get("lastOOMTime")),
        overrun=status.get("overrun"),
        overrun_at=read_time(status.get("overrunTime")),
        peaks=Peaks(
            **{
                name: _read_histogram(each)
                for name, each in status.get("peaks", {}).items()
                if name in _PEAKS
            }
        ),
    )


def _write_histogram(histogram: Histogram) -> Json:
    weights = {str(bucket): weight for bucket, weight in histogram.weights}
    return {"time": write_time(histogram.reference), "weights": weights}


def _read_histogram(entry: Mapping[str, Any]) -> Histogram:
    """Buckets that are no numbers, and weights of nothing or less, are left out."""
    weights = sorted(
        (int(bucket), float(weight))
        for bucket, weight in entry["weights"].items()
        if bucket.isdecimal() and int(bucket) <= HIGHEST_BUCKET and weight > 0
    )
    return Histogram(tuple(weights), read_time(entry["time"]) or 0.0)


def _read_blocked(entry: Mapping[str, Any]) -> Blocked:
    return Blocked(
        utilization=entry["gpuMemoryUtilization"],
        retreat=entry["retreat"],
        at=read_time(entry["time"]) or 0.0,
        failure_class=FailureClass(entry["class"]),
        count=entry.get("count", 1),
    )
