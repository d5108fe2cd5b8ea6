"""What is found again, by whom, and what never is; on the scheduler, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import AllocationFailure, StepBatch
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.prefix_cache import PrefixCache, PrefixHashes, hash_block, hash_root
from support.loop_harness import LoopHarness

BLOCK = 16


def harness_of(num_blocks: int = 64, **config: object) -> LoopHarness:
    base = EngineConfig(model="m", block_size=BLOCK, max_model_len=min(512, num_blocks * BLOCK))
    return LoopHarness(num_blocks, config=replace(base, **config))  # type: ignore[arg-type]


def submit(
    harness: LoopHarness,
    name: str,
    tokens: Sequence[int],
    output: int = 4,
    *,
    salt: str | None = None,
    prompt_logprobs: int | None = None,
) -> None:
    harness.submit(
        name,
        len(tokens),
        output,
        prompt_token_ids=tuple(tokens),
        cache_salt=salt,
        prompt_logprobs=prompt_logprobs,
    )


def cached_tokens(harness: LoopHarness, name: str) -> int:
    return harness.final(name).num_cached_tokens


def serve(harness: LoopHarness, name: str, tokens: Sequence[int], **options: object) -> int:
    """Alone, to its end; the tokens that were found."""
    submit(harness, name, tokens, **options)  # type: ignore[arg-type]
    harness.run()
    return cached_tokens(harness, name)


class TestHashes:
    def test_the_same_tokens_have_the_same_name_however_they_came(self) -> None:
        tokens = list(range(70))
        grown = PrefixHashes(BLOCK, {})
        for length in range(0, 70, 7):
            grown.of(tokens[:length], length // BLOCK)
        assert list(grown.of(tokens, 4)) == list(PrefixHashes(BLOCK, {}).of(tokens, 4))
        assert list(grown.of(tokens, 2)) == list(grown.of(tokens, 4))[:2]

    def test_a_block_has_its_name_from_all_tokens_before_it_too(self) -> None:
        first = PrefixHashes(BLOCK, {}).of([*range(16), *range(100, 116)], 2)
        other = PrefixHashes(BLOCK, {}).of([*range(1, 17), *range(100, 116)], 2)
        assert len({*first, *other}) == 4

    def test_token_ids_are_not_run_together(self) -> None:
        assert hash_block(b"", [1, 23]) != hash_block(b"", [12, 3])
        assert hash_block(b"", [1 << 32]) != hash_block(b"", [0, 1])

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({}, {"cache_salt": ""}),
            ({"cache_salt": "a"}, {"cache_salt": "b"}),
            # vLLM GHSA-rm76-4mrf-v9r8, 44701: a salt that is spelled like an adapter's name.
            ({"cache_salt": "a"}, {"adapter": "a"}),
            ({"adapter": "a", "cache_salt": "b"}, {"adapter": "b", "cache_salt": "a"}),
            ({"adapter": "ab", "cache_salt": "c"}, {"adapter": "a", "cache_salt": "bc"}),
            ({"adapter": "x"}, {"adapterx": ""}),
        ],
    )
    def test_other_keys_start_another_chain(
        self, one: dict[str, str], other: dict[str, str]
    ) -> None:
        assert hash_root(one) != hash_root(other)
        assert hash_root(one) == hash_root(dict(reversed(one.items())))


class TestIndex:
    def test_a_chain_is_found_up_to_its_first_unknown_block(self) -> None:
        cache = PrefixCache()
        cache.remember(5, b"a")
        cache.remember(2, b"c")
        assert cache.find([b"a", b"b", b"c"]) == (5,)
        assert cache.find([b"c"]) == (2,)

    def test_the_longest_unused_goes_first_and_is_not_found_any_more(self) -> None:
        cache = PrefixCache()
        for block, name in enumerate([b"a", b"b", b"c"]):
            cache.remember(block, name)
            assert cache.retire(block)
        cache.revive(0)
        cache.retire(0)
        assert [cache.evict(), cache.evict()] == [1, 2]
        assert cache.find([b"b"]) == ()
        cache.check()
        assert cache.evict_from(0) == [0]
        with pytest.raises(KeyError):
            cache.evict()

    def test_a_block_without_a_name_is_not_kept(self) -> None:
        cache = PrefixCache()
        assert not cache.retire(7)
        assert cache.evictable == 0


class TestReuse:
    def test_full_blocks_of_the_same_start_are_not_computed_again(self) -> None:
        harness = harness_of()
        assert serve(harness, "a", range(40)) == 0
        assert serve(harness, "b", [*range(40), *range(90, 120)]) == 32
        last = next(b for b in harness.executor.batches if b.chunks[0].request_id == "b")
        assert (last.chunks[0].start, len(last.chunks[0].token_ids)) == (32, 38)

    @pytest.mark.parametrize(("length", "found"), [(31, 16), (32, 16), (33, 32), (48, 32)])
    def test_at_least_one_token_is_computed(self, length: int, found: int) -> None:
        harness = harness_of()
        serve(harness, "a", range(length))
        assert serve(harness, "b", range(length)) == found

    def test_a_start_shorter_than_a_block_is_not_found(self) -> None:
        harness = harness_of()
        serve(harness, "a", range(15))
        assert serve(harness, "b", range(15)) == 0

    def test_output_is_found_as_the_start_of_the_next_turn(self) -> None:
        harness = harness_of()
        serve(harness, "a", range(20), output=20)
        turn = [*range(20), *harness.tokens("a")]
        # Of the 40 tokens the last was never computed, and two full blocks are.
        assert serve(harness, "b", [*turn, 7, 8]) == 32

    def test_requests_that_run_share_blocks_and_both_go_on_when_one_ends(self) -> None:
        harness = harness_of(8)
        submit(harness, "a", range(64), 20)
        harness.step()
        submit(harness, "b", range(64), 40)
        harness.step()
        # Four blocks and one for a's output; b shares three and has one for its last tokens.
        assert harness.loop.snapshot().used_blocks == 4 + 1 + 1
        harness.loop.abort("a")
        harness.run()
        assert cached_tokens(harness, "b") == 48
        assert len(harness.tokens("b")) == 40

    def test_what_others_hold_makes_room_for_a_prompt_that_would_not_fit(self) -> None:
        harness = harness_of(10)
        submit(harness, "a", range(96), 4)
        harness.step()
        # Seven blocks: three more than are free, and six of them are a's.
        submit(harness, "b", [*range(96), 500], 4)
        harness.step()
        assert harness.loop.snapshot().running == 2

    def test_a_start_that_many_share_is_computed_by_those_of_the_first_steps_alone(self) -> None:
        harness = harness_of(256, max_num_batched_tokens=400)
        for number in range(32):
            submit(harness, str(number), [*range(320), *range(number, number + 8)], 8)
        harness.run()
        # The first step has room for all of one request and the start of a second.
        computed = sum(step.num_tokens for step in harness.observer.steps)
        assert computed == 2 * 328 + 30 * 8 + 32 * 7
        assert harness.loop.snapshot().prefix_cache_hits == 30 * 320

    def test_another_salt_finds_nothing_and_the_same_one_does(self) -> None:
        harness = harness_of()
        serve(harness, "a", range(40), salt="mine")
        assert serve(harness, "b", range(40), salt="yours") == 0
        assert serve(harness, "c", range(40)) == 0
        assert serve(harness, "d", range(40), salt="mine") == 32

    def test_log_probabilities_of_a_prompt_are_computed_from_its_start(self) -> None:
        harness = harness_of()
        serve(harness, "a", range(40))
        assert serve(harness, "b", range(40), prompt_logprobs=1) == 0
        entries = [e for output in harness.outputs["b"] for e in output.prompt_logprobs]
        assert len(entries) == 39

    def test_off_means_off(self) -> None:
        harness = harness_of(enable_prefix_caching=False)
        serve(harness, "a", range(40))
        assert serve(harness, "b", range(40)) == 0
        now = harness.loop.snapshot()
        assert (now.prefix_caching, now.prefix_cache_queries, now.prefix_cache_hits) == (
            False,
            0,
            0,
        )

    def test_a_refused_step_makes_nothing_findable(self) -> None:
        harness = harness_of()

        def refuse(batch: StepBatch) -> None:
            raise AllocationFailure("refused", 1)

        harness.executor.before_step = refuse
        submit(harness, "a", range(40))
        harness.step()
        harness.executor.before_step = None
        harness.loop.abort("a")
        assert serve(harness, "b", range(40)) == 0


class TestMemory:
    def test_cached_blocks_are_free_in_usage_and_given_up_when_needed(self) -> None:
        harness = harness_of(4)
        serve(harness, "a", range(40))
        assert harness.loop.snapshot().used_blocks == 0
        assert harness.loop.snapshot().kv_cache_usage == 0.0
        serve(harness, "b", range(100, 160))
        # b took all four blocks: of a nothing is left.
        assert serve(harness, "c", range(40)) == 0

    def test_a_shrink_gives_up_cached_blocks_at_once(self) -> None:
        harness = harness_of(16, max_model_len=64)
        serve(harness, "a", range(60), output=4)
        figures = harness.executor.figures
        fixed = figures.weights + figures.activations + figures.runtime
        four = (fixed + 4.5 * figures.bytes_per_block) / figures.total
        result = harness.loop.move_limits(1, Limits(gpu_memory_utilization=four))
        assert result.outcome is LimitsOutcome.APPLIED
        assert harness.executor.committed == 4
        assert serve(harness, "b", range(60)) == 48

    def test_a_preempted_request_finds_its_own_blocks_again(self) -> None:
        harness = harness_of(8)
        submit(harness, "a", range(48), 60)
        submit(harness, "b", range(200, 248), 20)
        harness.run()
        final = harness.final("b")
        assert final.preemptions == 1
        assert final.num_cached_tokens == 0, "what it found of its own is no hit"
        with_cache = harness.loop.snapshot().recomputed_tokens

        without = harness_of(8, enable_prefix_caching=False)
        submit(without, "a", range(48), 60)
        submit(without, "b", range(200, 248), 20)
        without.run()
        assert without.final("b").preemptions == 1
        assert 0 < with_cache < without.loop.snapshot().recomputed_tokens
        assert harness.tokens("b") == without.tokens("b")

    def test_the_counters_are_tokens_of_first_admissions(self) -> None:
        harness = harness_of()
        serve(harness, "a", range(40))
        serve(harness, "b", range(50))
        now = harness.loop.snapshot()
        assert (now.prefix_cache_queries, now.prefix_cache_hits) == (90, 32)
        assert [r.num_prompt_computed_tokens for r in harness.observer.finished] == [40, 18]
        assert sum(s.prompt_tokens for s in harness.observer.steps) == 90
