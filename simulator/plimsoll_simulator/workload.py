"""What is asked of the engines in one run: a thinned trace with an injection, by seed.

In: a trace, how much of it, an injection, a seed. Out: a :class:`Workload`. The same seed gives the
same workload to every policy. This module knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from plimsoll_simulator.hardware import GIB, MIB
from plimsoll_simulator.memory_model import CoTenant, Leak
from plimsoll_simulator.traces import Arrival, Trace

LONG_INPUT = 8192

_WARM_UP = 20 * 60.0
_JITTER = 5 * 60.0
_BURST = 10 * 60.0
# After a burst its tail still counts as within.
_TAIL = 5 * 60.0


class InjectionError(ValueError):
    """No such injection, or a rate that is none."""


@dataclass(frozen=True)
class Window:
    start: float
    end: float

    def __contains__(self, time: float) -> bool:
        return self.start <= time < self.end


@dataclass(frozen=True)
class SimulatedRequest:
    """``prompt_logprobs``: wants log-probabilities of its prompt, whose rows nobody has reserved."""

    number: int
    time: float
    input_tokens: int
    output_tokens: int
    prompt_logprobs: bool = False

    @property
    def is_long(self) -> bool:
        return self.input_tokens > LONG_INPUT

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class Workload:
    """``requests`` in order of time; ``windows`` are the bursts with their tails; ``span`` seconds
    are simulated, and then until the last request has ended."""

    requests: tuple[SimulatedRequest, ...]
    windows: tuple[Window, ...]
    span: float
    cotenant: CoTenant | None = None
    leak: Leak | None = None


@dataclass(frozen=True)
class Injection:
    """``seconds`` that a run takes with it; ``rate`` has a meaning only where long requests come
    one by one (B1, B8, B9)."""

    name: str
    description: str
    seconds: float
    default_rate: float | None = None


INJECTIONS = {
    each.name: each
    for each in (
        Injection("B0", "none", 3600.0),
        Injection("B1", "24k to 32k prompts for 10 min", 3600.0, 0.08),
        Injection("B2", "three prompts of 100k to 120k at once", 3600.0),
        Injection("B3", "15 % of the traffic is 16k to 64k for 2 h", 3 * 3600.0),
        Injection("B4", "outputs four times as long for 10 min", 3600.0),
        Injection("B5", "prompt log-probabilities on 5 % of prompts of 16k and more", 3600.0, 0.08),
        Injection("B6", "another process takes 1 GiB for 15 min", 3600.0),
        Injection("B7", "50 MiB leak an hour for 12 h", 13 * 3600.0),
        Injection("B8", "the burst of B1 each hour", 4 * 3600.0, 0.08),
        Injection("B9", "the burst of B1 on for 60 s and off for 60 s", 3600.0, 0.16),
    )
}


def build_workload(
    trace: Trace,
    *,
    keep: float,
    injection: str,
    seed: int,
    rate: float | None = None,
    seconds: float | None = None,
) -> Workload:
    """``keep`` is the share of the trace's requests that is kept, by chance; the trace is repeated
    until ``seconds`` (the injection's own by default) are full. ``rate`` in requests per second."""
    chosen = INJECTIONS.get(injection)
    if chosen is None:
        raise InjectionError(f"--inject is {injection!r}; expected one of {', '.join(INJECTIONS)}")
    if not 0 < keep <= 1:
        raise InjectionError(f"--keep is {keep}; expected a share above 0, up to 1")
    if rate is not None and not 0 < rate <= 100:
        raise InjectionError(f"--rate is {rate}; expected requests per second above 0, up to 100")
    span = chosen.seconds if seconds is None else seconds
    chance = random.Random(f"workload {seed}")
    base = _thin(trace, keep, span, chance)
    start = _WARM_UP + chance.uniform(-_JITTER, _JITTER)
    extra = _BUILDERS[injection](base, start, span, rate or chosen.default_rate or 0.0, chance)
    arrivals = sorted(extra.arrivals, key=lambda pair: pair[0].time)
    requests = tuple(
        SimulatedRequest(number, a.time, a.input_tokens, a.output_tokens, logprobs)
        for number, (a, logprobs) in enumerate(arrivals)
        if a.time < span
    )
    return Workload(requests, extra.windows, span, extra.cotenant, extra.leak)


# An arrival, and whether it wants prompt log-probabilities.
_Marked = tuple[Arrival, bool]


@dataclass(frozen=True)
class _Injected:
    arrivals: list[_Marked]
    windows: tuple[Window, ...]
    cotenant: CoTenant | None = None
    leak: Leak | None = None


def _thin(trace: Trace, keep: float, span: float, chance: random.Random) -> list[Arrival]:
    """A whole trace begins again one mean gap after its end."""
    period = trace.span * (1 + 1 / len(trace.arrivals)) or 1.0
    kept: list[Arrival] = []
    offset = 0.0
    while offset < span:
        for arrival in trace.arrivals:
            time = arrival.time + offset
            if time >= span:
                break
            if chance.random() < keep:
                kept.append(replace(arrival, time=time))
        offset += period
    return kept


def _poisson(
    rate: float, window: Window, chance: random.Random, inputs: tuple[int, int]
) -> Iterator[_Marked]:
    time = window.start + chance.expovariate(rate)
    while time < window.end:
        lengths = chance.randint(*inputs), chance.randint(256, 1024)
        yield Arrival(time, *lengths), False
        time += chance.expovariate(rate)


_LONG = (24_576, 32_256)


def _plain(base: list[Arrival]) -> list[_Marked]:
    return [(arrival, False) for arrival in base]


def _burst_window(start: float, seconds: float = _BURST) -> tuple[Window, ...]:
    return (Window(start, start + seconds + _TAIL),)


def _b0(base: list[Arrival], *_: object) -> _Injected:
    return _Injected(_plain(base), ())


def _b1(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    burst = _poisson(rate, Window(start, start + _BURST), chance, _LONG)
    return _Injected([*_plain(base), *burst], _burst_window(start))


def _b2(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    three = [
        (Arrival(start, chance.randint(100_000, 120_000), chance.randint(256, 1024)), False)
        for _ in range(3)
    ]
    return _Injected([*_plain(base), *three], _burst_window(start))


def _b3(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    window = Window(start, start + 2 * 3600.0)
    shifted = [
        replace(a, input_tokens=chance.randint(16_384, 65_536))
        if a.time in window and chance.random() < 0.15
        else a
        for a in base
    ]
    return _Injected(_plain(shifted), (window,))


def _b4(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    window = Window(start, start + _BURST)
    storm = [replace(a, output_tokens=4 * a.output_tokens) if a.time in window else a for a in base]
    return _Injected(_plain(storm), _burst_window(start))


def _b5(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    """On the burst of B1, without which short traces have no prompts of that length."""
    injected = _b1(base, start, span, rate, chance)
    marked = [
        (a, a.input_tokens >= 16_384 and chance.random() < 0.05) for a, _ in injected.arrivals
    ]
    return replace(injected, arrivals=marked)


def _b6(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    seconds = 15 * 60.0
    tenant = CoTenant(start, seconds, float(GIB))
    return _Injected(_plain(base), _burst_window(start, seconds), tenant)


def _b7(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    seconds = 12 * 3600.0
    leak = Leak(start, seconds, 50 * MIB / 3600.0)
    return _Injected(_plain(base), (Window(start, start + seconds),), None, leak)


def _b8(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    marked, windows = _plain(base), list[Window]()
    while start < span:
        marked += _poisson(rate, Window(start, start + _BURST), chance, _LONG)
        windows += _burst_window(start)
        start += 3600.0
    return _Injected(marked, tuple(windows))


def _b9(
    base: list[Arrival], start: float, span: float, rate: float, chance: random.Random
) -> _Injected:
    marked, end = _plain(base), span - _TAIL
    first = start
    while start < end:
        marked += _poisson(rate, Window(start, min(start + 60.0, end)), chance, _LONG)
        start += 120.0
    return _Injected(marked, (Window(first, span),))


_Builder = Callable[[list[Arrival], float, float, float, random.Random], _Injected]
_BUILDERS: dict[str, _Builder] = {
    "B0": _b0, "B1": _b1, "B2": _b2, "B3": _b3, "B4": _b4,
    "B5": _b5, "B6": _b6, "B7": _b7, "B8": _b8, "B9": _b9,
}  # fmt: skip
