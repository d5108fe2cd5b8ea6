"""The long lane: where it starts, what it spares the admitted length, and what moves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.bounds import Bounds, Pool
from plimsoll_operator.tuning.histogram import EMPTY
from plimsoll_operator.tuning.lane import long_prompt_tokens
from plimsoll_operator.tuning.policy import DEFAULT_POLICY
from plimsoll_operator.tuning.values import (
    LANE,
    Learned,
    Limits,
    Parameter,
    Peaks,
    Rule,
    Source,
)
from support.tuning import CALM, FULL, INTERVAL, START, Fleet, events, settings, with_lane

BATCH = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
ROOMY = {"kv_cache_usage": 0.50, "waiting": 3, "running": 20}


def fleet(**changes: Any) -> Fleet:
    return Fleet(with_lane(**changes))


class Preempting(Fleet):
    """Half a preemption per second, for as long as it is looked at."""

    preempted = 0.0

    def thrash(self, seconds: float, **page: Any) -> None:
        for _ in range(int(seconds / self.interval)):
            self.preempted += 0.5 * self.interval
            self.look(**(FULL | page), preemptions_total=self.preempted)

    def rest(self, seconds: float, **page: Any) -> None:
        self.idle(seconds, **page, preemptions_total=self.preempted)


class TestStart:
    def test_the_strongest_simple_rule_is_in_force_from_the_first_decision(self) -> None:
        found = fleet()
        decision = found.look()
        assert decision.limits == Limits(
            8192, 0.90, watermark=0.05, long_prompt_tokens=2048, long_prompt_share=0.70
        )
        assert decision.revision == 1
        assert decision.changes == ()
        assert decision.source is Source.SPEC
        found.idle(600)
        assert found.state.revision == 1

    @pytest.mark.parametrize(
        ("ceiling", "pool", "tokens"),
        [
            (131_072, None, 8192),
            (131_072, 162_000, 8192),
            # 24 GB: two of the longest short prompts fit into the 30 % that the lane leaves.
            (131_072, 31_808, 4768),
            (4096, None, 1024),
            (None, None, 8192),
            (32, 64, 16),
        ],
    )
    def test_what_is_long(self, ceiling: int | None, pool: int | None, tokens: int) -> None:
        pools = () if pool is None else (Pool(0.9, pool // 16, 16, 1000.0),)
        bounds = Bounds(None, ceiling, 0.5, 0.9, None, pools)
        assert long_prompt_tokens(bounds, 16, DEFAULT_POLICY) == tokens

    def test_a_flag_of_the_users_pins_its_limit(self) -> None:
        found = fleet(pinned=frozenset({Parameter.WATERMARK}))
        assert found.look().limits.watermark is None
        assert found.state.limits.long_prompt_share == 0.70

    def test_a_runtime_without_a_lane_gets_none(self) -> None:
        found = fleet(live=frozenset(Parameter) - set(LANE))
        assert found.look().limits == Limits(8192, 0.90)

    @pytest.mark.parametrize("mode", [TuningMode.OFF, TuningMode.ADVISE, TuningMode.HOLD])
    def test_modes_that_move_nothing_start_without_one(self, mode: TuningMode) -> None:
        decision = fleet(mode=mode).look()
        assert decision.limits == Limits(8192, 0.90)
        wanted = 0.70 if mode is TuningMode.ADVISE else None
        assert decision.target.long_prompt_share == wanted

    def test_off_takes_it_out_of_force_and_hold_keeps_it(self) -> None:
        for mode, share, watermark in [(TuningMode.OFF, 1.0, 0.0), (TuningMode.HOLD, 0.70, 0.05)]:
            found = fleet()
            found.idle(10)
            found.settings = with_lane(mode=mode)
            decision = found.look()
            assert decision.limits.long_prompt_share == share
            assert decision.limits.watermark == watermark
            rules = {change.rule for change in decision.changes}
            assert rules == ({Rule.MODE} if mode is TuningMode.OFF else set())

    def test_a_cache_of_another_size_moves_what_is_long_but_not_for_a_little(self) -> None:
        found = fleet(start=Limits(131_072, 0.90), ceiling=131_072)
        seen = {"max_model_len_ceiling": 131_072, "block_size": 16}
        plan = {"planned_bytes": {"kv_cache": 600 << 20}}
        found.idle(30, usable_blocks=10_000, **seen, **plan)
        found.idle(30, usable_blocks=2800, **seen, **plan)
        found.idle(30, usable_blocks=2500, **seen, **plan)
        assert found.values(Parameter.LONG_PROMPT_TOKENS) == [8192, 6000]
        assert found.idle(30, usable_blocks=1800, **seen, **plan).limits.long_prompt_tokens == 4320
        assert events(found) == ["LaneChanged"] * 2


class TestLength:
    def test_a_queue_is_the_lanes_to_clear(self) -> None:
        found = fleet()
        found.idle(5)
        found.idle(25, **FULL)
        assert found.lengths == [8192]

    def test_a_queue_that_does_not_clear_is_answered(self) -> None:
        """A long prompt may wait 30 s where a short one may wait 2."""
        found = fleet()
        found.idle(60, **FULL)
        assert found.lengths == [8192, 4096, 2048, 1024]
        first = found.state.history[0]
        assert first.rule is Rule.PRESSURE
        assert first.time >= START + 30

    @pytest.mark.parametrize(
        ("why", "short", "long", "shortened"),
        [
            ("short ones wait, and the lane has no more to give", 9.0, 0.0, True),
            ("long ones wait: they are served late, not sent away", 0.0, 300.0, False),
            ("both wait, and the lane gives to neither", 4.0, 60.0, False),
            ("short ones wait for less than their objective", 1.5, 0.0, False),
        ],
    )
    def test_it_takes_short_prompts_for_which_the_lane_can_do_no_more(
        self, why: str, short: float, long: float, shortened: bool
    ) -> None:
        found = fleet()
        found.idle(120, **FULL, short_wait=short, long_wait=long)
        assert (found.lengths != [8192]) is shortened, why
        if shortened:
            lane = Parameter.LONG_PROMPT_SHARE
            narrowed = [c.time for d in found.log for c in d.changes if c.parameter is lane]
            assert found.values(lane) == [0.70, 0.60, 0.50]
            first = next(c for c in found.state.history if c.rule is Rule.PRESSURE)
            assert first.time >= narrowed[-1] + 30

    def test_patience_follows_the_objective(self) -> None:
        found = fleet(time_to_first_token=5.0)
        found.idle(70, **FULL)
        assert found.lengths == [8192]
        found.idle(15, **FULL)
        assert found.lengths[:2] == [8192, 4096]


class TestPreemption:
    def test_first_more_is_kept_free_then_fewer_run_then_the_length(self) -> None:
        found = Preempting(with_lane(**BATCH))
        found.idle(5)
        found.thrash(100)
        order = [change.parameter for change in found.state.history]
        watermark, seqs, length = (
            Parameter.WATERMARK,
            Parameter.MAX_NUM_SEQS,
            Parameter.MAX_MODEL_LEN,
        )
        assert order[:4] == [watermark, watermark, seqs, length]
        assert found.values(watermark) == [0.05, 0.075, 0.1]
        # A fifth fewer than the six that run.
        assert found.values(seqs)[:2] == [None, 4]
        assert {"WatermarkRaised", "BatchLowered", "LengthLowered"} <= set(events(found))

    def test_known_outputs_say_at_once_how_much_is_needed(self) -> None:
        outputs = EMPTY.added([(8000.0, 100.0)], START)
        found = Preempting(with_lane(**BATCH), Learned(peaks=Peaks(outputs=outputs)))
        size = {"usable_blocks": 1000, "block_size": 16}
        found.idle(5, **size)
        # 6 requests of 2,600 tokens each, with 4,000 more to come on average, in 16,000 tokens.
        found.thrash(20, **size)
        assert found.values(Parameter.WATERMARK) == [0.05, 0.1]

    def test_room_brings_it_back(self) -> None:
        found = Preempting(with_lane(**BATCH, tunes_length=False, floor=None))
        found.idle(5)
        found.thrash(60)
        assert found.state.limits.max_num_seqs == 4
        found.rest(300, **ROOMY)
        assert found.state.limits.max_num_seqs == 256
        assert found.state.tuned.max_num_seqs is None
        assert found.state.limits.watermark == 0.1
        found.rest(1500, **ROOMY)
        assert found.state.limits.watermark == 0.05
        assert found.log[-1].source is Source.SPEC

    def test_fewer_never_run_for_a_batch_that_is_not_known(self) -> None:
        found = Preempting(with_lane())
        found.thrash(120)
        assert found.state.limits.max_num_seqs is None


class TestShare:
    def learned(self, peak: float, windows: float) -> Learned:
        return Learned(peaks=Peaks(short=EMPTY.added([(peak, windows)], START)))

    @pytest.mark.parametrize(
        ("why", "peak", "windows", "share"),
        [
            ("short prompts need more", 0.38, 24, 0.55),
            ("they need less", 0.20, 24, 0.77),
            ("about what the lane leaves", 0.25, 24, 0.70),
            ("an hour is not known yet", 0.38, 8, 0.70),
            ("never less than half", 0.90, 24, 0.50),
            ("never nearly all", 0.01, 24, 0.85),
        ],
    )
    def test_what_short_prompts_held_is_left_to_them(
        self, why: str, peak: float, windows: float, share: float
    ) -> None:
        found = Fleet(with_lane(), self.learned(peak, windows))
        decision = found.idle(30, **CALM)
        assert decision.limits.long_prompt_share == pytest.approx(share, abs=0.02), why

    def test_it_moves_rarely(self) -> None:
        found = Fleet(with_lane(), self.learned(0.38, 24))
        found.idle(30, **CALM)
        found.learned = self.learned(0.20, 24)
        found.idle(500, **CALM)
        assert len(found.values(Parameter.LONG_PROMPT_SHARE)) == 2
        found.idle(120, **CALM)
        assert len(found.values(Parameter.LONG_PROMPT_SHARE)) == 3
        assert events(found) == ["LaneNarrowed", "LaneWidened"]


class TestBatchBudget:
    """2048 tokens of activations are planned with 240 of the 1200 MiB: half frees more than a
    step of the line, a quarter of it (at 512) no more."""

    PLANNED: ClassVar[dict[str, Any]] = {"planned_bytes": {"activations": 240 << 20}}

    def test_a_caught_failure_halves_it_while_that_frees_enough(self) -> None:
        found = fleet(**BATCH)
        found.idle(15, **self.PLANNED)
        for count in (1.0, 2.0, 3.0, 4.0, 5.0):
            found.look(allocation_failures_total=count, **self.PLANNED)
            found.idle(15, allocation_failures_total=count, **self.PLANNED)
        assert found.values(Parameter.MAX_NUM_BATCHED_TOKENS) == [None, 1024, 512, 256]
        assert found.utilizations == [0.90, 0.88, 0.86]

    def test_it_comes_back_after_six_hours_with_memory_to_spare(self) -> None:
        found = fleet(**BATCH)
        found.idle(15, **self.PLANNED)
        found.look(allocation_failures_total=1.0, **self.PLANNED)
        page = {"allocation_failures_total": 1.0, **self.PLANNED}
        found.idle(60, **page)
        found.now += 6 * 3600
        found.idle(30, device_free_low_water_bytes=100 << 20, **page)
        assert found.state.limits.max_num_batched_tokens == 1024
        found.learned = replace(found.learned, last_oom_at=found.now - 3600)
        found.idle(30, **page)
        assert found.state.limits.max_num_batched_tokens == 1024
        found.learned = replace(found.learned, last_oom_at=None)
        found.idle(30, **page)
        assert found.state.limits.max_num_batched_tokens == 2048

    def test_where_activations_are_small_the_line_moves(self) -> None:
        found = fleet(**BATCH)
        small = {"planned_bytes": {"activations": 20 << 20}}
        found.idle(15, **small)
        decision = found.look(allocation_failures_total=1.0, **small)
        assert decision.limits.gpu_memory_utilization == 0.88
        assert decision.limits.max_num_batched_tokens is None


def test_settings_without_a_lane_have_none() -> None:
    assert Fleet(settings()).idle(INTERVAL).limits == Limits(8192, 0.90)


class TestBalance:
    """Objectives: 2 s for the first token, so 30 s for a long prompt."""

    @pytest.mark.parametrize(
        ("why", "short", "long", "shares"),
        [
            ("long ones have waited too long, nobody else waits", 0.0, 20.0, [0.70, 0.80]),
            ("short ones have waited too long", 1.5, 0.0, [0.70, 0.60]),
            ("neither has used half of its patience", 0.9, 14.0, [0.70]),
            ("both have, about as much of it", 1.5, 28.0, [0.70]),
            ("both have, the long ones far more", 1.5, 60.0, [0.70, 0.80]),
            ("the page does not say", None, 60.0, [0.70]),
        ],
    )
    def test_who_has_waited_more_of_what_it_may_gets_a_step(
        self, why: str, short: float | None, long: float, shares: list[float]
    ) -> None:
        found = fleet()
        found.idle(15, **ROOMY, short_wait=short, long_wait=long)
        assert found.values(Parameter.LONG_PROMPT_SHARE) == shares, why

    def test_it_goes_on_by_steps_up_to_its_bounds(self) -> None:
        up, down = fleet(), fleet()
        up.idle(300, **ROOMY, short_wait=0.0, long_wait=30.0)
        down.idle(300, **ROOMY, short_wait=9.0, long_wait=0.0)
        assert up.values(Parameter.LONG_PROMPT_SHARE) == [0.70, 0.80, 0.90]
        assert down.values(Parameter.LONG_PROMPT_SHARE) == [0.70, 0.60, 0.50]

    def test_a_single_page_moves_nothing(self) -> None:
        found = fleet()
        for _ in range(20):
            found.look(**ROOMY, short_wait=0.0, long_wait=30.0)
            found.look(**ROOMY, short_wait=0.0, long_wait=0.0)
        assert found.values(Parameter.LONG_PROMPT_SHARE) == [0.70]

    def test_who_waits_is_helped_within_a_minute_and_long_ones_twice_a_day(self) -> None:
        """To narrow the lane again is quick; to widen it again waits half an hour, then a day."""
        found = Fleet(with_lane(), interval=20.0)
        found.look(**ROOMY)
        turned = []
        for _ in range(3):
            for page in (
                {"short_wait": 0.0, "long_wait": 30.0},
                {"short_wait": 9.0, "long_wait": 0.0},
            ):
                before = found.state.limits.long_prompt_share
                begin = found.now
                while found.look(**ROOMY, **page).limits.long_prompt_share == before:
                    assert found.now - begin < 90_000
                turned.append(found.now - begin)
        # The first is no turn, and a day after the second it is forgotten.
        assert turned[1:4] == [60, 1860, 60]
        assert turned[4] > 23 * 3600
        assert turned[5] == 60

    def test_what_past_hours_say_does_not_take_it_back(self) -> None:
        peaks = Peaks(short=EMPTY.added([(0.38, 24)], START))
        found = Fleet(with_lane(), Learned(peaks=peaks))
        found.idle(15, **ROOMY, short_wait=0.0, long_wait=30.0)
        assert found.state.limits.long_prompt_share == 0.80
        found.idle(1500, **CALM, short_wait=0.0, long_wait=0.0)
        assert found.state.limits.long_prompt_share == 0.80

    def test_a_pinned_lane_stays(self) -> None:
        found = Fleet(settings(**BATCH))
        found.idle(60, **ROOMY, short_wait=0.0, long_wait=30.0)
        assert found.state.limits.long_prompt_share is None
