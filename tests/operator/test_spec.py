import pytest

from plimsoll_operator.spec import Bounds, Deployment, InvalidSpec, KeyRef, ModelSource, TuningMode
from support.resources import deployment, llmdeployment


def test_a_minimal_spec_gets_the_documented_defaults() -> None:
    resource = llmdeployment()
    resource["spec"] = {"model": {"uri": "hf://org/tiny"}}

    parsed = Deployment.parse(resource)

    assert parsed.replicas == 1
    assert parsed.tensor_parallel_size == 1
    assert parsed.accelerator == "nvidia.com/gpu"
    assert parsed.engine.block_size == 16
    assert parsed.engine.gpu_memory_utilization == 0.9
    assert parsed.engine.max_model_len is None
    assert (parsed.engine.max_num_seqs, parsed.engine.max_num_batched_tokens) == (256, 2048)
    assert parsed.tuning.mode is TuningMode.AUTO
    assert parsed.tuning.max_model_len is None
    assert (parsed.drain, parsed.soak, parsed.progress_deadline) == (60, 0, 1800)
    assert parsed.scrape_interval == 5


@pytest.mark.parametrize(
    ("model", "source", "location", "claim", "served"),
    [
        ({"uri": "hf://org/tiny"}, ModelSource.HUB, "org/tiny", None, "org/tiny"),
        (
            {"uri": "pvc://weights/a/b.gguf"},
            ModelSource.CLAIM,
            "/model/a/b.gguf",
            "weights",
            "assistant",
        ),
        ({"uri": "file:///opt/m"}, ModelSource.FILE, "/opt/m", None, "assistant"),
        ({"uri": "hf://org/tiny", "servedName": "chat"}, ModelSource.HUB, "org/tiny", None, "chat"),
    ],
)
def test_the_uri_says_where_the_engine_finds_the_model(
    model: dict[str, str], source: ModelSource, location: str, claim: str | None, served: str
) -> None:
    parsed = deployment(model=model).model

    assert (parsed.source, parsed.location, parsed.claim) == (source, location, claim)
    assert parsed.served_name == served


@pytest.mark.parametrize("uri", ["oci://", "org/tiny", "hf://", "pvc://claim"])
def test_a_uri_that_the_schema_would_refuse_is_refused_here_too(uri: str) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.model.uri is .*; allowed: hf://org/name"):
        deployment(model={"uri": uri})


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("1m30s", 90), ("500ms", 0.5), ("1.5h", 5400), ("0s", 0)]
)
def test_durations_are_go_durations(text: str, seconds: float) -> None:
    assert deployment(drain=text).drain == seconds


@pytest.mark.parametrize("text", ["60", "", "1 s", "-1s", "1d"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.drain is .*allowed: a duration"):
        deployment(drain=text)


@pytest.mark.parametrize(
    ("engine", "tuning", "ceiling"),
    [
        ({}, {}, None),
        ({"maxModelLen": 8192}, {}, 8192),
        ({"maxModelLen": 8192}, {"maxModelLen": {"minAllowed": 4096, "maxAllowed": 32768}}, 32768),
        ({"maxModelLen": 65536}, {"maxModelLen": {"maxAllowed": 32768}}, 65536),
        ({}, {"maxModelLen": {"minAllowed": 4096, "maxAllowed": 32768}}, 32768),
        ({}, {"maxModelLen": {"minAllowed": 4096}}, None),
    ],
)
def test_the_ceiling_is_the_larger_of_start_and_max_allowed(
    engine: dict[str, int], tuning: dict[str, object], ceiling: int | None
) -> None:
    assert deployment(engine=engine, tuning=tuning).ceiling == ceiling


def test_an_empty_accelerator_means_cpu() -> None:
    assert deployment(accelerator={"resourceName": ""}).on_cpu
    assert not deployment(accelerator={"resourceName": "amd.com/gpu"}).on_cpu


def test_references_and_bounds_are_kept() -> None:
    parsed = deployment(
        model={"uri": "hf://org/tiny", "tokenSecretRef": {"name": "hf", "key": "token"}},
        apiKeySecretRef={"name": "api", "key": "k"},
        tuning={"mode": "Hold", "gpuMemoryUtilization": {"minAllowed": 0.8, "maxAllowed": 0.94}},
    )

    assert parsed.model.token == KeyRef("hf", "token")
    assert parsed.api_key == KeyRef("api", "k")
    assert parsed.tuning.mode is TuningMode.HOLD
    assert parsed.tuning.gpu_memory_utilization == Bounds(0.8, 0.94)
