"""Fixtures for every test: the local cluster, started when the first test asks for it.

Tests run in several processes (`make test`), those of a file in one of them, since they share what
is costly to make.
"""

import os
import signal

import pytest
from xdist.remote import Producer

from support.file_scheduling import FileScheduling
from support.local_cluster import local_cluster, local_namespace

__all__ = ["local_cluster", "local_namespace"]

# Waiting OpenMP threads would take the cores from the other processes. Children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# With several test processes on the cores, threads of one would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets what it starts in the background ignore Ctrl-C, and children inherit that; some tests
# are of Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that share a running cluster are run by one process, which starts it once.
CLUSTERS = {
    "control plane": (
        "test_chart",
        "test_cli",
        "test_operator_image",
        "test_standby",
        "test_api_schema",
        "test_manifests",
        "test_advisor",
        "test_prefetch",
        "test_faulty_node",
        "test_groups",
    ),
    # With a control plane of its own.
    "lifecycle": ("test_operator_lifecycle", "test_operator_rollouts", "test_operator_drift"),
    "local cluster": (
        "test_serving",
        "test_example",
        "test_agent_pods",
        "test_agent_mounts",
        "test_agent_traffic",
        "test_vllm_runtime",
        "test_groups_served",
        "test_credentials_rotated",
    ),
}
GROUPS = {stem: group for group, stems in CLUSTERS.items() for stem in stems}

# What takes longest, in the order in which it is begun: files, and the groups above.
FIRST = (
    "lifecycle",
    "local cluster",
    "test_smollm2_greedy",
    "test_tensor_parallel",
    "test_smollm2_preemption",
    "control plane",
    "test_cluster_processes",
    "test_models",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(unit(item.path.stem)))


def unit(stem: str) -> str:
    """What the tests of this file are run with: the name of its group, else its own."""
    return GROUPS.get(stem, stem)


def rank(unit: str) -> int:
    """Sorting by it keeps the order in which the others were collected."""
    return FIRST.index(unit) if unit in FIRST else len(FIRST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    return FileScheduling(config, log, unit)
