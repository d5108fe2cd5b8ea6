"""Kubernetes' quantities as numbers.

In: ``768Mi`` or ``1G`` as a spec or a pod has it. Out: the number, exactly. The one door to the
client library's parser, which is as pure as those judgements are that may not import the client.
"""

from __future__ import annotations

from decimal import Decimal

from kubernetes.utils import quantity as kubernetes_quantity


def parse_quantity(quantity: object) -> Decimal | None:
    """None for what is no quantity."""
    try:
        number: Decimal = kubernetes_quantity.parse_quantity(quantity)
    except ValueError:
        return None
    return number
