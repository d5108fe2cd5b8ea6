"""What the cluster says about one deployment, read every few seconds while the burst runs.

In:  the API server (the LLMDeployment and its pods) and the engine's /metrics.
Out: a Reading per deployment: the values of the live view, and the counts that the table needs.

Kills and restarts are counted from the pods, not from the operator's own status, so the table does
not rest on the word of the thing it judges. What could not be read is None, never zero. Knows
nothing of the client or of how a reading is shown.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from kubernetes.aio import client as kubernetes_client
from prometheus_client.parser import text_string_to_metric_families

GROUP, VERSION, PLURAL = "plimsoll.dev", "v1alpha1", "llmdeployments"
DEPLOYMENT_LABEL = "plimsoll.dev/deployment"
POLL_INTERVAL_S = 2.0
UNREADABLE = (kubernetes_client.ApiException, aiohttp.ClientError, TimeoutError, OSError)

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """One change that the tuner made, as status.tuning.history has it."""

    time: str
    parameter: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class EngineGauges:
    """What one scrape of /metrics says. Lengths in tokens, memory in bytes, shares from 0 to 1."""

    kv_usage: float | None
    running: int | None
    waiting: int | None
    admitted_length: int | None
    ceiling: int | None
    utilization: float | None
    free_bytes_low_water: int | None
    preemptions: int | None


UNREAD = EngineGauges(None, None, None, None, None, None, None, None)


@dataclass(frozen=True)
class Reading:
    """One deployment at one moment.

    ready: (ready, wanted) replicas. why_not_ready: the Ready condition's message while it is not True.
    oom_kills, restarts: since the watch began, of all pods ever seen.
    decisions: everything the tuner has done, oldest first.
    """

    ready: tuple[int, int] | None
    why_not_ready: str | None
    gauges: EngineGauges
    oom_kills: int
    restarts: int
    other_deaths: tuple[str, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Death:
    """The end of one container run. The identity keeps one death from being counted twice."""

    pod_uid: str
    container_id: str
    reason: str
    exit_code: int


def parse_gauges(page: str) -> EngineGauges:
    """Reads the gauges out of a /metrics page. Raises ValueError for a page that is none."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values[sample.name] = sample.value

    def whole(name: str) -> int | None:
        return int(values[name]) if name in values else None

    return EngineGauges(
        kv_usage=values.get("vllm:kv_cache_usage_perc"),
        running=whole("vllm:num_requests_running"),
        waiting=whole("vllm:num_requests_waiting"),
        admitted_length=whole("plimsoll:max_model_len_admitted"),
        ceiling=whole("plimsoll:max_model_len_ceiling"),
        utilization=values.get("plimsoll:gpu_memory_utilization"),
        free_bytes_low_water=whole("plimsoll:device_memory_free_low_water_bytes"),
        preemptions=whole("vllm:num_preemptions_total"),
    )


def find_deaths(pods: Iterable[Json]) -> frozenset[Death]:
    """Every container end that these pods still remember (the present state and the last one)."""
    deaths = set()
    for pod in pods:
        for status in pod.get("status", {}).get("containerStatuses") or []:
            for state in (status.get("state"), status.get("lastState")):
                ended = (state or {}).get("terminated")
                if ended:
                    deaths.add(
                        Death(
                            pod_uid=pod["metadata"]["uid"],
                            container_id=ended.get("containerID") or ended.get("finishedAt") or "",
                            reason=ended.get("reason") or "",
                            exit_code=int(ended.get("exitCode", 0)),
                        )
                    )
    return frozenset(deaths)


def count_restarts(pods: Iterable[Json]) -> dict[str, int]:
    """Restarts by pod uid."""
    return {
        pod["metadata"]["uid"]: sum(
            int(status.get("restartCount", 0))
            for status in pod.get("status", {}).get("containerStatuses") or []
        )
        for pod in pods
    }


def read_decisions(resource: Json) -> tuple[Decision, ...]:
    """The tuner's history in an LLMDeployment's status, oldest first."""
    history = resource.get("status", {}).get("tuning", {}).get("history") or []
    decisions = [
        Decision(
            time=str(entry.get("time", "")),
            parameter=str(entry.get("parameter", "")),
            before=str(entry.get("from", "")),
            after=str(entry.get("to", "")),
            reason=str(entry.get("reason", "")),
        )
        for entry in history
    ]
    return tuple(sorted(decisions, key=lambda decision: decision.time))


def find_condition(resource: Json, kind: str) -> Json | None:
    """One condition of a resource, or None when it has not been judged for this generation."""
    generation = resource["metadata"].get("generation")
    for condition in resource.get("status", {}).get("conditions") or []:
        if condition["type"] == kind and condition.get("observedGeneration") == generation:
            return dict(condition)
    return None


class Watch:
    """Reads one deployment again and again and remembers what passed by."""

    def __init__(self, api: kubernetes_client.ApiClient, namespace: str, name: str) -> None:
        self._objects = kubernetes_client.CustomObjectsApi(api)
        self._core = kubernetes_client.CoreV1Api(api)
        self._api = api
        self._namespace = namespace
        self._name = name
        self._deaths: set[Death] = set()
        self._restarts: dict[str, int] = {}
        self._decisions: dict[Decision, None] = {}

    async def get_resource(self) -> dict[str, Any]:
        """The LLMDeployment as the API server has it."""
        resource = await self._objects.get_namespaced_custom_object(
            GROUP, VERSION, self._namespace, PLURAL, self._name
        )
        return cast(dict[str, Any], resource)

    async def list_pods(self) -> list[dict[str, Any]]:
        """Its engine pods in their JSON form."""
        pods = await self._core.list_namespaced_pod(
            self._namespace, label_selector=f"{DEPLOYMENT_LABEL}={self._name}"
        )
        to_json = cast(Callable[[Any], dict[str, Any]], self._api.sanitize_for_serialization)
        return [to_json(pod) for pod in pods.items]

    async def read(self, http: aiohttp.ClientSession, base_url: str) -> Reading:
        """One reading; `base_url` is the engine's, without /v1."""
        resource, pods, gauges = await asyncio.gather(
            self.get_resource(), self.list_pods(), scrape(http, base_url)
        )
        self._deaths |= find_deaths(pods)
        self._restarts |= count_restarts(pods)
        self._decisions |= dict.fromkeys(read_decisions(resource))
        ready = find_condition(resource, "Ready")
        status = resource.get("status", {})
        kills = [death for death in self._deaths if death.reason == "OOMKilled"]
        others = [death for death in self._deaths if death.reason != "OOMKilled"]
        return Reading(
            ready=(int(status.get("readyReplicas", 0)), int(resource["spec"].get("replicas", 1))),
            why_not_ready=None
            if ready is not None and ready["status"] == "True"
            else str((ready or {}).get("message") or "not judged yet"),
            gauges=gauges,
            oom_kills=len(kills),
            restarts=sum(self._restarts.values()),
            other_deaths=tuple(f"{death.reason} ({death.exit_code})" for death in others),
            decisions=tuple(sorted(self._decisions, key=lambda decision: decision.time)),
        )


async def scrape(http: aiohttp.ClientSession, base_url: str) -> EngineGauges:
    """The engine's gauges, or UNREAD when it does not answer within two seconds."""
    try:
        timeout = aiohttp.ClientTimeout(total=2)
        async with http.get(f"{base_url}/metrics", timeout=timeout) as response:
            if response.status != 200:
                return UNREAD
            return parse_gauges(await response.text())
    except (aiohttp.ClientError, TimeoutError, ValueError, OSError):
        return UNREAD


async def follow(
    watch: Watch,
    http: aiohttp.ClientSession,
    base_url: str,
    note: Callable[[Reading], None],
) -> None:
    """Reads until cancelled. A reading that fails is left out: the one before stays on show."""
    while True:
        with contextlib.suppress(*UNREADABLE):
            note(await watch.read(http, base_url))
        await asyncio.sleep(POLL_INTERVAL_S)
