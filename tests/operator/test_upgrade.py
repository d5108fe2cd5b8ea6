"""An upgrade of the operator changes no pod that runs: pod templates are those of every release.

``tests/e2e/upgrade/VERSION/pod-templates.json`` holds specs and the templates that the release made
of them. A template that differs by one field would roll every pod of every user at the upgrade.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll_operator.desired.metadata import fingerprint
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.spec import Deployment

RELEASES = Path(__file__).parents[1] / "e2e" / "upgrade"
CASES = {
    f"{path.parent.name}-{name}": case
    for path in sorted(RELEASES.glob("*/pod-templates.json"))
    for name, case in json.loads(path.read_text()).items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_template_is_that_of_the_release(case: dict[str, Any]) -> None:
    deployment = Deployment.parse(
        {
            "metadata": {"name": "assistant", "namespace": "default", "uid": "u", "generation": 1},
            "spec": case["spec"],
        }
    )
    template = build_pod_template(deployment, "plimsoll/engine:0.1.0")
    assert template == case["template"]
    assert fingerprint(template) == fingerprint(case["template"])


def test_there_is_a_release_to_compare_with() -> None:
    assert len(CASES) >= 4
