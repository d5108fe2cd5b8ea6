"""The health script for Argo CD says what each status means, in the Lua that Argo CD has (5.1, without
its libraries for files and programs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from plimsoll_operator import checks

Json = dict[str, Any]
FOLDER = Path(__file__).parents[2] / "manifests" / "argocd"
SCRIPT = FOLDER / "llmdeployment-health.lua"
CASES: list[Json] = yaml.safe_load((Path(__file__).parent / "health.yaml").read_text())
SERVING = {
    "Ready": {"status": "True", "reason": "Serving", "message": "2 of 2 replicas serve"},
    "Available": {"status": "True", "reason": "ReplicasServe", "message": "2 of 2 replicas serve"},
    "Progressing": {"status": "True", "reason": "Complete", "message": "up to date"},
    "Degraded": {"status": "False", "reason": "AsExpected", "message": "none"},
    "Stalled": {"status": "False", "reason": "AsExpected", "message": "none"},
}


def judge(resource: Json) -> Json:
    lua = LuaRuntime(register_eval=False, register_builtins=False, unpack_returned_tuples=True)
    lua.execute("os, io, require, package, debug = nil, nil, nil, nil, nil")
    lua.globals().obj = lua.table_from(resource, recursive=True)
    return dict(lua.execute(SCRIPT.read_text()))


def resource(case: Json) -> Json:
    found: Json = {"metadata": {"name": "assistant", "generation": 2}}
    conditions = SERVING | case.get("conditions", {})
    listed = [{"type": kind, **condition} for kind, condition in conditions.items()]
    made = {"observedGeneration": case.get("observedGeneration", 2), "conditions": listed}
    status = case.get("status", made)
    return found if status is None else found | {"status": status}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_a_status_has_its_health(case: Json) -> None:
    assert judge(resource(case)) == {"status": case["health"], "message": case["message"]}


def test_every_reason_that_the_script_knows_is_one_of_the_operator() -> None:
    """A renamed reason would turn a deployment that is scaled to zero into one that never gets on."""
    text = (
        Path(str(checks.__file__)).read_text()
        + Path(checks.__file__, "..", "desired", "status.py").resolve().read_text()
    )
    for reason in ("ScaledToZero", "ReconcileFailed"):
        assert f'"{reason}"' in SCRIPT.read_text()
        assert f'"{reason}"' in text


def test_the_patch_holds_the_script() -> None:
    patch = yaml.safe_load((FOLDER / "configmap-patch.yaml").read_text())
    key = "resource.customizations.health.plimsoll.dev_LLMDeployment"
    assert patch == {"data": {key: SCRIPT.read_text()}}
