"""What one pass of an advisor saw, as frozen values. Out of observe.py, into advise.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll_operator.advisor.flags import VllmFlags
from plimsoll_operator.advisor.spec import Advisor
from plimsoll_operator.checks import Violation
from plimsoll_operator.observed import Pod
from plimsoll_operator.tuning.values import EngineReading, Unknown

Json = dict[str, Any]


@dataclass(frozen=True)
class AdvisedPod:
    """``pod.container`` is the one that runs vLLM, ``flags`` are its words; ``serves`` is False for a
    worker of a group, which has no page; ``no_container`` when spec.container names none of its."""

    pod: Pod
    flags: VllmFlags
    serves: bool
    uses_device: bool
    no_container: bool = False
    # Of the container's ports, by name.
    ports: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return self.pod.name


@dataclass(frozen=True)
class Observed:
    """``missing``: why there is no target. ``pages`` has an entry for each pod that was asked, by
    name; ``pods`` are sorted by name."""

    advisor: Advisor
    resource: Json
    missing: Violation | None
    pods: tuple[AdvisedPod, ...]
    pages: Mapping[str, EngineReading | Unknown]

    @property
    def readings(self) -> tuple[EngineReading, ...]:
        found = (page for _, page in sorted(self.pages.items()))
        return tuple(page for page in found if isinstance(page, EngineReading))

    @property
    def engines(self) -> dict[str, EngineReading | Unknown]:
        """The pages that count: one that cannot be had from a pod that is not ready is a pod that
        starts, and no gap in what is known."""
        ready = {each.name for each in self.pods if each.pod.ready}
        return {
            pod: page
            for pod, page in self.pages.items()
            if isinstance(page, EngineReading) or pod in ready
        }

    @property
    def newest(self) -> AdvisedPod | None:
        """The pod whose words count: the last one that was made, of those that serve."""
        serving = [each for each in self.pods if each.serves and not each.no_container]
        return max(serving, key=lambda each: (each.pod.created_at, each.name), default=None)
