"""Fixtures for every test: the local cluster, started when the first test asks for it.

Tests run in several processes (`make test`), those of a file in one of them, since they share what
is costly to make.
"""

import os
import signal

import pytest

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

# The files that take longest, in the order in which they are begun.
FIRST = (
    "test_serving",
    "test_operator_lifecycle",
    "test_smollm2_greedy",
    "test_tensor_parallel",
    "test_smollm2_preemption",
    "test_example",
    "test_models",
    "test_cluster_processes",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=rank)


def rank(item: pytest.Item) -> int:
    """Sorting by it keeps the order in which the others were collected."""
    stem = item.path.stem
    return FIRST.index(stem) if stem in FIRST else len(FIRST)
