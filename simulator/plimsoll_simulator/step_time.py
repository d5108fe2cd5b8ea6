"""How long one step takes on a device. In: what the step computes. Out: seconds.

Two models: kernel times measured on an RTX 4090, interpolated, and a roofline for others. Neither
knows requests or memory.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import product

from plimsoll_simulator.hardware import LLAMA_3_1_8B, RTX_4090, Hardware, Model

# One prompt chunk of a step: its tokens, and those of its request that were computed before.
Prefill = tuple[int, int]
# (prefills, number of decoding requests, tokens that those hold together) -> seconds.
StepTime = Callable[[Sequence[Prefill], int, int], float]

_LAYERS = 32
# In each layer; the others are once in a step.
_PER_LAYER = (
    "layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm", "gate_up_proj", "act_fn",
    "down_proj",
)  # fmt: skip
_ONCE = ("embedding", "final_layernorm")


def step_time_of(hardware: Hardware, model: Model) -> StepTime:
    if (hardware, model) == (RTX_4090, LLAMA_3_1_8B):
        return measured_rtx4090()
    return roofline(hardware.bandwidth, hardware.flops, model)


def seconds_per_prompt_token(step_time: StepTime) -> float:
    """Of a whole step of 2048, without other context."""
    return step_time(((2048, 0),), 0, 0) / 2048


def roofline(bandwidth: float, flops: float, model: Model) -> StepTime:
    """Weights are read once per step or computed with, whichever takes longer; then the keys and
    values are read."""
    weights = model.weight_bytes / bandwidth
    per_token = 2 * model.parameters / flops
    per_kv_token = model.kv_bytes_per_token / bandwidth

    def step_time(prefills: Sequence[Prefill], decoding: int, held: int) -> float:
        tokens, context = decoding, held
        for count, before in prefills:
            tokens += count
            context += count + before
        return max(weights, per_token * tokens) + per_kv_token * context

    return step_time


@cache
def measured_rtx4090() -> StepTime:
    """Llama-3.1-8B in bfloat16 by the kernel times of LLMServingSim's profiler (data/NOTICE).

    Attention was measured for one prompt chunk beside decoding requests of equal length, so the
    longest chunk is looked up together with the decoding ones, and further chunks alone.
    """
    dense = _read_series("dense")
    linear = [
        sum(dense[layer](tokens) for layer in _ONCE)
        + _LAYERS * sum(dense[layer](tokens) for layer in _PER_LAYER)
        for tokens in range(2049)
    ]
    heads = _read_series("per_sequence")
    sampling = [heads["lm_head"](n) + heads["sampler"](n) for n in range(513)]
    attention = _read_attention()

    def step_time(prefills: Sequence[Prefill], decoding: int, held: int) -> float:
        tokens = decoding
        mean = held / decoding if decoding else 0.0
        if not prefills:
            micros = attention(0, 0, decoding, mean)
        elif len(prefills) == 1:
            count, before = prefills[0]
            tokens += count
            micros = attention(count, before, decoding, mean)
        else:
            largest, *others = sorted(prefills, reverse=True)
            micros = attention(*largest, decoding, mean)
            micros += sum(attention(*other, 0, 0.0) for other in others)
            tokens += sum(count for count, _ in prefills)
        # Above the largest step measured, time is in proportion to tokens.
        whole = linear[tokens] if tokens < 2049 else linear[2048] * tokens / 2048
        rows = decoding + len(prefills)
        micros = _LAYERS * micros + whole + (sampling[rows] if rows < 513 else sampling[512])
        return micros * 1e-6

    return step_time


def _read_rows(name: str) -> list[dict[str, str]]:
    source = files("plimsoll_simulator") / "data" / f"rtx4090_llama-3.1-8b_{name}.csv"
    with source.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _read_series(name: str) -> Mapping[str, Callable[[float], float]]:
    """Microseconds by layer and size, linear in between and beyond."""
    points: dict[str, dict[float, float]] = {}
    for row in _read_rows(name):
        layer, size, time = row.values()
        points.setdefault(layer, {})[float(size)] = float(time)
    return {layer: _line_through(times) for layer, times in points.items()}


def _line_through(points: Mapping[float, float]) -> Callable[[float], float]:
    sizes = sorted(points)

    def at(size: float) -> float:
        index = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        low, high = sizes[index - 1], sizes[index]
        share = (size - low) / (high - low)
        return max(0.0, points[low] + share * (points[high] - points[low]))

    return at


def _read_attention() -> Callable[[float, float, float, float], float]:
    """Microseconds of one layer by (chunk, its context before, decoding requests, their mean
    length): multilinear between the measured points, linear beyond the last."""
    table: dict[tuple[int, ...], float] = {}
    for row in _read_rows("attention"):
        *place, time = row.values()
        table[tuple(int(value) for value in place)] = float(time)
    axes = [sorted({place[axis] for place in table}) for axis in range(4)]
    # The mixed part was not measured with the most decoding requests.
    mixed = [*axes[:2], sorted({p[2] for p in table if p[0] and p[2]}), axes[3]]
    alone: dict[tuple[int, int], float] = {}
    by_length: dict[int, Callable[[float], float]] = {}

    def corners(axis: Sequence[int], value: float) -> tuple[tuple[int, float], ...]:
        index = min(max(bisect_right(axis, value), 1), len(axis) - 1)
        low, high = axis[index - 1], axis[index]
        share = (value - low) / (high - low)
        if share == 0.0:
            return ((low, 1.0),)
        return ((low, 1.0 - share), (high, share))

    def look_up(axes: Sequence[Sequence[int]], place: Sequence[float]) -> float:
        pairs = [
            corners(axis, value) if value else ((0, 1.0),)
            for axis, value in zip(axes, place, strict=True)
        ]
        total = 0.0
        for corner in product(*pairs):
            key = tuple(point for point, _ in corner)
            weight = math.prod(share for _, share in corner)
            total += weight * time_at(key)
        return max(0.0, total)

    def time_at(key: tuple[int, ...]) -> float:
        if key in table:
            return table[key]
        chunk, before, decoding, length = key
        # A corner with no chunk, or with no decoding request, has no length either.
        if not chunk:
            before = 0
        if not decoding or not length:
            decoding = length = 0
        return table.get((chunk, before, decoding, length), 0.0)

    def attention(chunk: float, before: float, decoding: float, length: float) -> float:
        if not decoding:
            key = (int(chunk), int(before))
            if key not in alone:
                alone[key] = look_up(axes, (chunk, before, 0, 0))
            return alone[key]
        if chunk:
            return look_up(mixed, (chunk, before, decoding, length))
        number = int(decoding)
        if number not in by_length:
            by_length[number] = _line_through(
                {float(at): look_up(axes, (0, 0, number, at)) for at in axes[3] if at}
            )
        return by_length[number](length)

    return attention
