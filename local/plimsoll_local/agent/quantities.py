"""Kubernetes quantities (``1500m``, ``2Gi``) as numbers."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from kubernetes.utils import quantity

_parse: Callable[[str], Decimal] = quantity.parse_quantity


def parse_quantity(text: str | int) -> Decimal:
    """Raises ValueError for text that is no quantity."""
    return _parse(str(text))


def parse_bytes(text: str | int) -> int:
    """Whole bytes, rounded down."""
    return int(parse_quantity(text))
