"""`plan`: what an LLMDeployment would become, without a cluster.

In: the deployment as parsed, and a byte budget where the model's sizes are known. Out: children, the
planner's steps, and text. The builders and the planner are the operator's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.budget.memory import Budget
from plimsoll_operator.budget.verdict import Verdict
from plimsoll_operator.cli import words
from plimsoll_operator.desired import build_children, build_template
from plimsoll_operator.observed import Credentials, Observed, Pod, StatefulSet
from plimsoll_operator.plan import Step, next_step
from plimsoll_operator.runtimes import vllm_flags
from plimsoll_operator.spec import Deployment, RuntimeName
from plimsoll_operator.tuning.settings import tuning_settings

Json = dict[str, Any]

# In place of what the operator makes for each deployment.
_NOT_SHOWN = Credentials(b"", b"", b"")
_NOTES = {
    "Secret": "certificate and token of the control channel, made by the operator",
    "ConfigMap": "the limits with which an engine starts",
    "PodDisruptionBudget": "a drained node takes one replica at a time",
    "StatefulSet": "the engine pods",
    "LeaderWorkerSet": "the groups of engine pods; lws.sigs.k8s.io must be installed",
}


@dataclass(frozen=True)
class Sized:
    """A budget with its verdict; ``device`` says in words whose memory it is."""

    budget: Budget
    verdict: Verdict
    device: str


@dataclass(frozen=True)
class Situation:
    what: str
    step: Step


@dataclass(frozen=True)
class Plan:
    """``sized`` None: ``unsized`` says what is missing for a budget, or what rules one out."""

    deployment: Deployment
    children: tuple[Json, ...]
    situations: tuple[Situation, ...]
    sized: Sized | None
    unsized: str | None = None


def build_plan(
    deployment: Deployment, engine_image: str, sized: Sized | None, unsized: str | None = None
) -> Plan:
    situations = build_situations(deployment)
    children = build_children(
        deployment,
        step=situations[0].step,
        template=build_template(deployment, engine_image),
        credentials=_NOT_SHOWN,
        limits=tuning_settings(deployment).start,
        revision=1,
    )
    shown = tuple(_shown(body) for body in children.values() if body is not None)
    return Plan(deployment, shown, situations, sized, unsized)


def _shown(body: Json) -> Json:
    """Without the uid, which only a cluster gives, and without what stands for secrets."""
    owners = [
        {key: value for key, value in owner.items() if key != "uid"}
        for owner in body["metadata"].get("ownerReferences", ())
    ]
    shown = {**body, "metadata": {**body["metadata"], "ownerReferences": owners}}
    if body["kind"] == "Secret":
        shown["data"] = dict.fromkeys(body["data"], "")
    return shown


def build_situations(deployment: Deployment) -> tuple[Situation, ...]:
    """What the operator does first, and what it will do with a later change."""
    replicas = deployment.replicas
    settled = StatefulSet(replicas, 0, 1, 1, "old", "old")
    nothing = _observed(deployment, None)
    return (
        Situation("nothing is there yet", next_step(nothing, given_up=False)),
        Situation("every pod serves", next_step(_observed(deployment, settled), given_up=False)),
        Situation(
            "the pod template is changed",
            next_step(
                replace(_observed(deployment, settled), pods=_serving(replicas)),
                given_up=False,
                applied=False,
            ),
        ),
        Situation(
            "the first template cannot work",
            next_step(_observed(deployment, settled), given_up=True),
        ),
    )


def _serving(replicas: int) -> tuple[Pod, ...]:
    """As far as a step depends on them."""
    return tuple(
        Pod(
            name=f"pod-{ordinal}",
            uid="",
            ordinal=ordinal,
            ip=None,
            node=None,
            revision="old",
            created_at=0.0,
            deleting=False,
            ready=True,
            ready_since=0.0,
            phase="Running",
            unschedulable=None,
            container=None,
        )
        for ordinal in range(replicas)
    )


def _observed(deployment: Deployment, statefulset: StatefulSet | None) -> Observed:
    return Observed(
        deployment=deployment,
        resource={},
        changed_at=0.0,
        children={},
        statefulset=statefulset,
        pods=(),
        credentials=None,
    )


def render(plan: Plan) -> str:
    deployment = plan.deployment
    size, where = deployment.ranks_per_pod, deployment.accelerator
    each = "on CPU" if where is None else f"of {size} x {where}"
    if deployment.in_groups:
        each = f"of {deployment.nodes} pods, each " + (
            f"with {size} ranks on CPU" if where is None else f"with {size} x {where}"
        )
    name = f"{deployment.namespace}/{deployment.name}"
    replicas = "1 replica" if deployment.replicas == 1 else f"{deployment.replicas} replicas"
    lines = [
        f"LLMDeployment {name}: {replicas} {each}, {deployment.model.uri}",
        *_runtime_lines(deployment),
        "",
        "Children",
    ]
    width = max(len(body["kind"]) for body in plan.children)
    long = max(len(body["metadata"]["name"]) for body in plan.children)
    for body in plan.children:
        name, kind = body["metadata"]["name"], body["kind"]
        lines.append(f"  {kind:<{width}}  {name:<{long}}  {_note(deployment, body)}".rstrip())
    lines += ["", "Rollout"]
    wide = max(len(situation.what) for situation in plan.situations)
    for situation in plan.situations:
        step = _step(situation.step, "group" if deployment.in_groups else "pod")
        lines.append(f"  {situation.what:<{wide}}  {step}")
    lines += ["", *_budget_lines(plan)]
    return "\n".join(lines)


def _runtime_lines(deployment: Deployment) -> list[str]:
    """What is not as with this project's engine."""
    if deployment.runtime is not RuntimeName.VLLM:
        return []
    version = vllm_flags.read_version(deployment.image, deployment.runtime_version)
    known = (
        "of unknown version (spec.runtime.version would tell it)"
        if version is None
        else "{}.{}.{}".format(*version)
    )
    return [
        f"vLLM {known} behind the gate: length, sequences and the long lane move while it serves;",
        "utilisation and batch are read at its start and stay what the spec says",
    ]


def _step(step: Step, unit: str) -> str:
    if step.replicas == 0:
        return f"{step.reason}: no {unit} is left"
    pods = f"1 {unit}" if step.replicas == 1 else f"{step.replicas} {unit}s"
    which = "all of them" if step.partition == 0 else f"those from ordinal {step.partition} on"
    return f"{step.reason}: {pods}, {which} with the newest template"


def _note(deployment: Deployment, body: Json) -> str:
    if body["kind"] == "Service":
        headless = body["metadata"]["name"] == names.headless_service(deployment.name)
        return "names the pods" if headless else names.url(deployment.name, deployment.namespace)
    return _NOTES.get(body["kind"], "")


def _budget_lines(plan: Plan) -> Iterable[str]:
    if plan.sized is None:
        return [f"Byte budget: {plan.unsized}"]
    sized = plan.sized
    budget, setup = sized.budget, sized.budget.setup
    size = setup.tensor_parallel_size
    held = size // setup.nodes if setup.on_cpu else 1
    shard = "all" if held == size else f"{held} of {size} shards"
    parts = ", ".join(
        f"{part} {words.byte_size(count)}" for part, count in budget.weights.items() if count
    )
    tied = " (lm_head is the embedding)" if budget.model.tied_embeddings else ""
    copies = ""
    if size > budget.model.num_kv_heads:
        copies = f", each KV head held by {size // budget.model.num_kv_heads} ranks"
    heads = f"{budget.kv_heads} of {budget.model.num_kv_heads} KV heads{copies}"
    rows = [
        ("weights", budget.weight_bytes, f"exact: {budget.dtype}, {shard}: {parts}{tied}"),
        (
            "activations",
            budget.activations,
            f"estimated from above for a step of {setup.max_num_batched_tokens} tokens",
        ),
        ("runtime", budget.runtime, "estimated: context, libraries, collective buffers"),
        (
            "KV cache",
            budget.kv_cache,
            f"{budget.num_blocks} blocks of {setup.block_size} tokens = {budget.pool_tokens} tokens",
        ),
        ("margin", budget.margin, f"left alone at utilisation {setup.utilization:g}"),
        ("device", setup.device, sized.device),
    ]
    ranks = "all ranks" if setup.nodes == 1 else f"{held} of {size} ranks"
    whose = f"of the container, for {ranks}" if setup.on_cpu else "of one accelerator"
    lines = [f"Byte budget {whose}"]
    for name, count, note in rows:
        share = 100 * count / setup.device
        lines.append(f"  {name:<12}{words.byte_size(count):>12} {share:6.1f} %  {note}")
    token, block = words.byte_size(budget.bytes_per_token), words.byte_size(budget.bytes_per_block)
    asked = "asked for" if setup.max_model_len else "the engine would take"
    positions = f"the model's positions allow {budget.model.max_model_len}"
    lines += [
        f"  KV cache per token {token}, per block {block}: {heads}",
        f"  length {asked} {words.number(budget.length)}, largest that fits {budget.longest} "
        + f"({positions})",
        f"  {_measured(plan.deployment)}",
        "",
        f"Verdict: {sized.verdict.text}",
    ]
    if sized.verdict.ways:
        ways = "; or ".join(f"{way.text} ({way.field})" for way in sized.verdict.ways)
        lines.append(f"Nearest settings that work: {ways}")
    return lines


def _measured(deployment: Deployment) -> str:
    if deployment.runtime is RuntimeName.VLLM:
        return "vLLM measures activations at its start; the blocks are this project's arithmetic"
    return "the engine measures activations and runtime at its start, and plans with that"


def to_json(plan: Plan) -> Json:
    document: Json = {
        "name": plan.deployment.name,
        "namespace": plan.deployment.namespace,
        "children": list(plan.children),
        "rollout": [
            {
                "when": situation.what,
                "replicas": situation.step.replicas,
                "partition": situation.step.partition,
                "reason": situation.step.reason.value,
            }
            for situation in plan.situations
        ],
    }
    if plan.sized is None:
        return {**document, "budget": None, "noBudget": plan.unsized}
    budget, verdict = plan.sized.budget, plan.sized.verdict
    document["budget"] = {
        "deviceBytes": budget.setup.device,
        "dtype": budget.dtype,
        "weightsBytes": budget.weight_bytes,
        "weightsBytesByPart": dict(budget.weights),
        "activationsBytesEstimated": budget.activations,
        "runtimeBytesEstimated": budget.runtime,
        "kvCacheBytes": budget.kv_cache,
        "marginBytes": budget.margin,
        "bytesPerToken": budget.bytes_per_token,
        "bytesPerBlock": budget.bytes_per_block,
        "blocks": budget.num_blocks,
        "poolTokens": budget.pool_tokens,
        "length": budget.length,
        "longestLength": budget.longest,
        "modelMaxLength": budget.model.max_model_len,
        "concurrency": budget.concurrency,
    }
    document["verdict"] = {
        "fits": verdict.fits,
        "text": verdict.text,
        "ways": [
            {"field": way.field, "value": way.value, "text": way.text} for way in verdict.ways
        ],
    }
    return document
