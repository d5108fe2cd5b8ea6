"""Kubernetes' quantities as numbers, for judgements that must not know the client.

In: ``768Mi`` or ``1G`` as a spec or a pod has it. Out: the number, exactly.
"""

from __future__ import annotations

import re
from decimal import Decimal

_BINARY = {f"{prefix}i": Decimal(1024) ** n for n, prefix in enumerate("KMGTPE", 1)}
_DECIMAL = {prefix: Decimal(1000) ** n for n, prefix in enumerate("kMGTPE", 1)}
_SMALL = {prefix: Decimal(1000) ** -n for n, prefix in enumerate("mun", 1)}
_SUFFIXES = {"": Decimal(1), **_BINARY, **_DECIMAL, **_SMALL}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([-+]?[0-9]{1,3})|([A-Za-z]*))")


def parse_quantity(quantity: str) -> Decimal | None:
    """None for what is no quantity."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        return None
    number, exponent, suffix = found.groups()
    if exponent is not None:
        return Decimal(number).scaleb(int(exponent))
    return Decimal(number) * _SUFFIXES[suffix] if suffix in _SUFFIXES else None
