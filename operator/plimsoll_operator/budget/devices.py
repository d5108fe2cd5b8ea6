"""How much memory an accelerator has for an engine, by the name of its model.

In: a name such as H100-80G. Out: bytes. A card's name promises more than a program is given: these
are the totals that torch reports for them, the least that was found in public reports of
out-of-memory errors ("GPU 0 has a total capacity of ..."); another driver may leave a little more.
"""

from __future__ import annotations

from collections.abc import Mapping

_GIB = 1 << 30

_TOTAL_GIB: Mapping[str, float] = {
    "A10-24G": 21.99,
    "A100-40G": 39.38,
    "A100-80G": 79.11,
    "H100-80G": 79.11,
    "H100-94G": 93.00,
    "H200-141G": 139.72,
    "L40S-48G": 44.40,
    "T4-16G": 14.75,
    "V100-32G": 31.74,
}

DEVICES: Mapping[str, int] = {name: int(size * _GIB) for name, size in _TOTAL_GIB.items()}
