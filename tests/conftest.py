"""Fixtures for every test: the local cluster, started when the first test asks for it.

Tests run in several processes (`make test`). What shares something costly stays in one of them: all
tests of the local cluster, all of the bare control plane, and else the tests of a file.
"""

import os

import pytest

from support.local_cluster import local_cluster, local_namespace

__all__ = ["local_cluster", "local_namespace"]

# Waiting OpenMP threads would take the cores from the other processes. Children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The groups that take longest, in the order in which they are begun.
FIRST = ("local_cluster", "control_plane", "test_smollm2_greedy")


# Before xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups = {item.nodeid: find_group(item) for item in items}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.nodeid]))
    items.sort(key=lambda item: rank(groups[item.nodeid]))


def find_group(item: pytest.Item) -> str:
    fixtures: list[str] = getattr(item, "fixturenames", [])
    shared = [name for name in FIRST if name in fixtures]
    return shared[0] if shared else item.path.stem


def rank(group: str) -> int:
    """Sorting by it keeps the order in which the others were collected."""
    return FIRST.index(group) if group in FIRST else len(FIRST)
