"""The StatefulSet controller as a model: what it makes of a :class:`Step`, pod by pod.

In: steps and templates. Out: pods as an operator would observe them. Follows the controller's source
(kubernetes/pkg/controller/statefulset, Parallel): missing pods are made at once, below the partition with
the current revision; from the highest ordinal down to the partition one old pod is deleted at a time, and
only while those above it are healthy; under OnDelete nothing is. A kubelet is part of it: a pod is ready one
tick after it was made, unless its template is one of ``bad`` (it crashes) or it finds no node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plimsoll_operator.observed import Observed, Pod, StatefulSet
from plimsoll_operator.plan import Step
from support.resources import NOW, llmdeployment, observed, pod

CRASHING = {"reason": "CrashLoopBackOff"}


@dataclass
class Place:
    revision: str
    age: int = 0
    serial: int = 0


@dataclass
class StatefulSetModel:
    """``nodes`` is how many pods find a node; ``broken`` are ordinals whose old pod crashes."""

    wanted: int
    revision: str = "A"
    bad: frozenset[str] = frozenset()
    nodes: int = 99
    broken: frozenset[int] = frozenset()
    spec: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas, self.partition, self.on_delete = self.wanted, 0, False
        self.current = self.update = self.revision
        self.places = {ordinal: Place(self.revision, age=9) for ordinal in range(self.wanted)}
        self.serial, self.now = 0, NOW

    def observe(self) -> Observed:
        found = StatefulSet(
            replicas=self.replicas,
            partition=0 if self.on_delete else self.partition,
            generation=1,
            observed_generation=1,
            current_revision=self.current,
            update_revision=self.update,
            on_delete=self.on_delete,
        )
        pods = tuple(self._pod(ordinal) for ordinal in sorted(self.places))
        resource = llmdeployment(replicas=self.wanted, **self.spec)
        return observed(resource, statefulset=found, pods=pods, status=self.status)

    def apply(self, step: Step, revision: str) -> None:
        self.replicas, self.partition = step.replicas, step.partition
        self.on_delete, self.update = step.on_delete, revision
        for each in step.replace:
            self.delete(each.ordinal)

    def delete(self, ordinal: int) -> None:
        self.places.pop(ordinal, None)

    def tick(self) -> None:
        self.now += 10.0
        for place in self.places.values():
            place.age += 1
        for ordinal in [each for each in self.places if each >= self.replicas]:
            self.delete(ordinal)
        missing = [each for each in range(self.replicas) if each not in self.places]
        for ordinal in missing:
            old = not self.on_delete and ordinal < self.partition
            self.serial += 1
            revision = self.current if old else self.update
            self.places[ordinal] = Place(revision, serial=self.serial)
        if missing or self.on_delete:
            return
        for ordinal in range(self.replicas - 1, self.partition - 1, -1):
            if self.places[ordinal].revision != self.update:
                self.delete(ordinal)
                return
            if not self._pod(ordinal).ready:
                return
        if all(p.revision == self.update and self._pod(o).ready for o, p in self.places.items()):
            self.current = self.update

    @property
    def picture(self) -> str:
        """``A B b -``: revisions by ordinal; small: it does not serve; ``-``: it is away."""
        return " ".join(
            "-" if ordinal not in self.places else self._letter(ordinal)
            for ordinal in range(max(self.replicas, *self.places, -1) + 1)
            if ordinal in self.places or ordinal < self.replicas
        )

    def _letter(self, ordinal: int) -> str:
        letter = self.places[ordinal].revision
        return letter if self._pod(ordinal).ready else letter.lower()

    def _pod(self, ordinal: int) -> Pod:
        place = self.places[ordinal]
        name = f"assistant-{ordinal}"
        state: dict[str, Any] = {"ready": place.age > 0}
        if sorted(self.places).index(ordinal) >= self.nodes:
            state = {"ready": False, "unschedulable": "0/3 nodes"}
        elif place.revision in self.bad or (ordinal in self.broken and place.serial == 0):
            state = {"ready": False, "waiting": CRASHING, "restarts": 2}
        since = self.now - 10.0 * (place.age - 1)
        return pod(name, revision=place.revision, ready_since=since, **state)
