"""The gates against the recorded run; the long one, G3, in a shorter form."""

from __future__ import annotations

from plimsoll_simulator import gates
from plimsoll_simulator.gates import (
    check_larger_pool,
    check_recomputation,
    check_replay,
    check_watermark,
    replay_recorded,
)


def test_g1_the_recorded_run_is_reproduced() -> None:
    assert [gate.figure for gate in check_replay(replay_recorded(2588)) if not gate.holds] == []


def test_g2_the_error_without_activation_memory_is_reproduced() -> None:
    assert check_larger_pool(replay_recorded(3400)).holds


def test_g3_holds_for_the_measurement_itself_and_not_without_the_watermarks_effect() -> None:
    measured = {mark: float(count) for mark, count in gates.PREEMPTIONS.items()}
    assert all(gate.holds for gate in check_watermark(measured))
    flat = dict.fromkeys(measured, 1065.0)
    assert not any(gate.holds for gate in check_watermark(flat)[1:])


def test_g4_wants_less_recomputation_in_a_larger_cache() -> None:
    recorded = replay_recorded(2588)
    assert all(gate.holds for gate in check_recomputation([0.3, 0.2, 0.1, 0.0], recorded))
    assert not check_recomputation([0.3, 0.2, 0.25, 0.0], recorded)[0].holds
