"""Fixtures for every test: the local cluster, started when the first test asks for it."""

from support.local_cluster import local_cluster, local_namespace

__all__ = ["local_cluster", "local_namespace"]
