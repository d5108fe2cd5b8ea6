"""The objects that the demo applies: the example as it is, and the pinned copy made from it.

In:  the example manifest of the repository. Out: plain objects. Pure but for reading the file.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

PINNED_UTILIZATION = 0.98


def find_repository() -> Path:
    """The checkout that this package was installed from (the chart and manifests are not in the
    package). Raises FileNotFoundError when it is not there."""
    repository = Path(__file__).resolve().parents[3]
    if not (repository / "charts" / "plimsoll" / "Chart.yaml").is_file():
        raise FileNotFoundError(
            f"the demo needs the chart and manifests of a checkout, and {repository} has none; "
            "run `make demo` in a clone of the repository"
        )
    return repository


def read_example(repository: Path) -> dict[str, Any]:
    """manifests/llmdeployment.yaml."""
    document: dict[str, Any] = yaml.safe_load(
        (repository / "manifests" / "llmdeployment.yaml").read_text(encoding="utf-8")
    )
    return document


def build_pinned_copy(example: dict[str, Any]) -> dict[str, Any]:
    """The same deployment under another name, its utilisation pinned and its tuning off."""
    pinned = copy.deepcopy(example)
    pinned["metadata"]["name"] += "-pinned"
    pinned["spec"]["engine"]["gpuMemoryUtilization"] = PINNED_UTILIZATION
    pinned["spec"]["tuning"] = {"mode": "Off"}
    return pinned
