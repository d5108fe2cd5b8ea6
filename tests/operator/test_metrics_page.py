"""Pages of engines -> readings (cases B05 and B08, and pages of other releases)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.tuning.values import EngineReading, Unknown, UnknownReason

LABELS = 'engine="0",model_name="m"'


def read(text: str, model: str = "m") -> EngineReading:
    found = read_page(text, pod="p-0", model=model, at=100.0)
    assert isinstance(found, EngineReading), found
    return found


def refuse(text: str, model: str = "m") -> Unknown:
    found = read_page(text, pod="p-0", model=model, at=100.0)
    assert isinstance(found, Unknown), found
    return found


B05_POD_1 = """\
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 2.1e+09
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 37
"""


def test_b05_missing_usage_is_unknown_and_names_the_metric() -> None:
    unknown = refuse(B05_POD_1)
    assert unknown.reason is UnknownReason.METRIC_MISSING
    assert unknown.pod == "p-0"
    assert unknown.metric == "vllm:kv_cache_usage_perc"
    assert "vllm:kv_cache_usage_perc" in unknown.message


@pytest.mark.parametrize(
    "name",
    ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:gpu_cache_usage_factor"],
)
def test_b05_every_name_of_the_usage_counts_as_present(name: str) -> None:
    assert read(f"{B05_POD_1}{name}{{{LABELS}}} 0.95\n").kv_cache_usage == 0.95


B08_LINES = """\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.97
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.05
vllm:kv_cache_usage_perc{engine="0",model_name="other"} 0.40
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 12
vllm:num_requests_waiting{engine="1",model_name="m"} 0
vllm:num_requests_waiting{engine="0",model_name="other"} 9
"""


def _reversed(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*reversed(lines), ""])


@pytest.mark.parametrize("page", [B08_LINES, _reversed(B08_LINES)], ids=["as is", "reversed"])
def test_b08_the_worst_engine_decides_usage_and_waiting_adds_up(page: str) -> None:
    found = read(page)
    assert found.kv_cache_usage == 0.97
    assert found.waiting == 12


@pytest.mark.parametrize(
    ("labels", "model"),
    [
        ('model_name="m",engine="0"', "m"),
        ('zone="a,b}",model_name="m",engine="0",extra="x=y"', "m"),
        (r'engine="0",model_name="a\"b"', 'a"b'),
        ('engine="0",model_name="org/name"', "org/name"),
        (r'engine="0",model_name="back\\slash"', "back\\slash"),
    ],
)
def test_b08_labels_in_any_form(labels: str, model: str) -> None:
    page = f"vllm:kv_cache_usage_perc{{{labels}}} 0.5\nvllm:num_requests_waiting{{{labels}}} 3\n"
    found = read(page, model)
    assert (found.kv_cache_usage, found.waiting) == (0.5, 3)


def test_a_pod_of_which_one_engine_is_silent_is_unknown() -> None:
    page = B08_LINES.replace('vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.05\n', "")
    assert refuse(page).metric == "vllm:kv_cache_usage_perc"


def test_only_other_models_means_unknown() -> None:
    assert refuse(B08_LINES, "third").reason is UnknownReason.METRIC_MISSING


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_value_that_is_no_number_is_unknown(value: str) -> None:
    page = (
        f"vllm:kv_cache_usage_perc{{{LABELS}}} {value}\nvllm:num_requests_waiting{{{LABELS}}} 0\n"
    )
    assert refuse(page).metric == "vllm:kv_cache_usage_perc"


FULL_PAGE = f"""\
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{LABELS}}} 0.25
vllm:num_requests_waiting{{{LABELS}}} 2
vllm:num_requests_running{{{LABELS}}} 3
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{{LABELS}}} 7
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{{LABELS},le="+Inf"}} 41
vllm:iteration_tokens_total_count{{{LABELS}}} 41
vllm:iteration_tokens_total_sum{{{LABELS}}} 900
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{engine="0",block_size="16"}} 1
# TYPE plimsoll:memory_planned_bytes gauge
plimsoll:memory_planned_bytes{{{LABELS},class="weights"}} 500
plimsoll:memory_planned_bytes{{{LABELS},class="kv_cache"}} 320
plimsoll:device_memory_total_bytes{{{LABELS}}} 1000
plimsoll:device_memory_free_low_water_bytes{{{LABELS}}} 60
plimsoll:kv_blocks_usable{{{LABELS}}} 20
plimsoll:max_model_len_ceiling{{{LABELS}}} 256
plimsoll:gpu_memory_utilization{{{LABELS}}} 0.9
plimsoll:limits_revision{{{LABELS}}} 4
plimsoll:requests_rejected_total{{{LABELS},reason="over_admitted_length"}} 5
plimsoll:requests_rejected_total{{{LABELS},reason="queue_full"}} 100
"""


def test_a_page_of_the_projects_engine() -> None:
    found = read(FULL_PAGE)
    assert found.started_at == 1.7e9
    assert (found.running, found.preemptions_total, found.steps_total) == (3, 7.0, 41.0)
    assert found.block_size == 16
    assert found.planned_bytes == {"weights": 500, "kv_cache": 320}
    assert (found.device_total_bytes, found.device_free_low_water_bytes) == (1000, 60)
    assert (found.usable_blocks, found.max_model_len_ceiling) == (20, 256)
    assert (found.gpu_memory_utilization, found.limits_revision) == (0.9, 4)
    assert found.rejected_over_length_total == 5.0
    # What the page does not have is unknown, not zero.
    assert found.device_free_bytes is None
    assert found.allocation_failures_total is None


@pytest.mark.parametrize(
    "text", ["<html><body>502 Bad Gateway</body></html>", 'vllm:a{b="c" 1', "name value\n"]
)
def test_what_is_no_metrics_page_is_unreadable(text: str) -> None:
    assert refuse(text).reason is UnknownReason.UNREADABLE


@run(deadline=None)
@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    """Whatever a pod answers, reading ends in a value."""
    assert isinstance(read_page(text, pod="p", model="m", at=0.0), Unknown)


@run(deadline=None)
@given(st.lists(st.sampled_from(FULL_PAGE.splitlines()), max_size=40))
def test_the_order_of_lines_does_not_matter(lines: list[str]) -> None:
    """Any part of a page reads the same backwards, or is refused both ways."""
    unique = list(dict.fromkeys(line for line in lines if not line.startswith("#")))
    page = "\n".join([*unique, ""])
    one = read_page(page, pod="p", model="m", at=0.0)
    two = read_page(_reversed(page), pod="p", model="m", at=0.0)
    assert one == two


STOCK = """\
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:num_requests_waiting{engine="0",model_name="m"} 2
"""


def test_what_stock_vllm_has_as_labels_alone_is_read() -> None:
    config = 'block_size="32",num_gpu_blocks="{}",gpu_memory_utilization="{}"'
    one = f"vllm:cache_config_info{{{config.format(2588, 0.92)}}} 1\n"
    found = read(STOCK + one)
    assert (found.usable_blocks, found.block_size, found.gpu_memory_utilization) == (2588, 32, 0.92)
    # Of two engines the smaller cache; unknown where one does not tell.
    two = one.replace("{", '{engine="0",') + (
        f'vllm:cache_config_info{{engine="1",{config.format(2000, 0.9)}}} 1\n'
    )
    assert read(STOCK + two).usable_blocks == 2000
    assert read(STOCK + two.replace('"2000"', '"None"')).usable_blocks is None
    # This project's own metric is the better word.
    own = 'plimsoll:kv_blocks_usable{engine="0",model_name="m"} 7\n'
    assert read(STOCK + one + own).usable_blocks == 7
    for bad in ("None", "0", "1.5", "x"):
        assert read(STOCK + one.replace('"0.92"', f'"{bad}"')).gpu_memory_utilization is None


def test_the_only_model_of_a_page_needs_no_name() -> None:
    found = read_page(STOCK, pod="p-0", model=None, at=1.0)
    assert isinstance(found, EngineReading)
    assert found.waiting == 2
    several = read_page(STOCK + STOCK.replace('"m"', '"n"'), pod="p-0", model=None, at=1.0)
    assert isinstance(several, Unknown)
    assert "several models (m, n)" in several.message
    none = read_page("up 1\n", pod="p-0", model=None, at=1.0)
    assert isinstance(none, Unknown)
    assert none.message == "vllm:kv_cache_usage_perc is not on its page"
