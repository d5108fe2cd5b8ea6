"""The pinned copy differs from the example in name, utilisation and tuning alone."""

from pathlib import Path

import yaml

from plimsoll_local.demo.manifests import build_pinned_copy
from plimsoll_local.demo.traffic import read_excerpt, shape_burst

MANIFESTS = Path(__file__).parents[2] / "manifests"


def test_the_pinned_copy_differs_in_three_places() -> None:
    example = yaml.safe_load((MANIFESTS / "llmdeployment.yaml").read_text())
    before = yaml.safe_dump(example)
    pinned = build_pinned_copy(example)
    assert yaml.safe_dump(example) == before
    assert pinned["metadata"]["name"] == "assistant-pinned"
    assert pinned["spec"]["engine"].pop("gpuMemoryUtilization") == 0.98
    assert pinned["spec"].pop("tuning") == {"mode": "Off"}
    del example["spec"]["tuning"], example["spec"]["engine"]["gpuMemoryUtilization"]
    assert pinned["spec"] == example["spec"]


def test_the_burst_fits_the_example() -> None:
    example = yaml.safe_load((MANIFESTS / "llmdeployment.yaml").read_text())
    ceiling = example["spec"]["engine"]["maxModelLen"]
    for arrival in shape_burst(read_excerpt(), seed=7):
        assert arrival.prompt_tokens + arrival.output_tokens <= ceiling


def test_the_claim_that_the_examples_need_is_among_them() -> None:
    claim = yaml.safe_load((MANIFESTS / "models-claim.yaml").read_text())
    for manifest in MANIFESTS.glob("llmdeployment*.yaml"):
        cache = yaml.safe_load(manifest.read_text())["spec"]["model"].get("cache")
        assert cache is None or cache["claimName"] == claim["metadata"]["name"]
