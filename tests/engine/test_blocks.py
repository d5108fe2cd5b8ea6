import pytest

from plimsoll_engine.blocks import BlockPool


def test_low_ids_go_first_and_come_back_first() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first == (0, 1, 2)
    pool.release((1,))
    assert pool.allocate(2) == (1, 3)
    pool.check({"a": (0, 2), "b": (1, 3)})


def test_an_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert (pool.free, pool.used) == (3, 0)
    pool.check({})


def test_a_lowered_line_stops_new_allocations_at_once() -> None:
    pool = BlockPool(8)
    held = pool.allocate(6)
    pool.set_usable(4)
    assert pool.free == 0
    assert pool.allocate(1) is None
    assert pool.used_above_line == 2
    assert pool.owned_end == 6
    assert held is not None
    pool.check({"a": held})


def test_blocks_above_the_line_are_withdrawn_when_their_owner_lets_go() -> None:
    pool = BlockPool(8)
    held = pool.allocate(6)
    assert held is not None
    pool.set_usable(4)
    pool.release(held)
    assert (pool.free, pool.used, pool.used_above_line) == (4, 0, 0)
    assert pool.owned_end == 4
    pool.set_committed(4)
    pool.check({})
    assert pool.allocate(4) == (0, 1, 2, 3)


def test_a_raised_line_gives_withdrawn_blocks_back() -> None:
    pool = BlockPool(8, usable=2)
    assert pool.free == 2
    pool.set_usable(8)
    assert pool.free == 8
    pool.set_committed(10)
    assert pool.free == 8
    pool.set_usable(10)
    assert pool.allocate(10) == tuple(range(10))


def test_memory_cannot_be_taken_from_under_an_owner_or_the_line() -> None:
    pool = BlockPool(8)
    assert pool.allocate(6)
    with pytest.raises(ValueError, match="fewer than usable"):
        pool.set_committed(7)
    pool.set_usable(2)
    with pytest.raises(ValueError, match=r"blocks \[4, 5\] are owned"):
        pool.set_committed(4)
    with pytest.raises(ValueError, match="allowed are 0 to 8"):
        pool.set_usable(9)


def test_a_wrong_release_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2)
    with pytest.raises(ValueError, match="block 3 is held by nobody"):
        pool.release((0, 3))
    with pytest.raises(ValueError, match="twice"):
        pool.release((0, 0))
    pool.check({"a": (0, 1)})


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({}, "tables"),
        ({"a": (0, 1), "b": (1,)}, "tables"),
        ({"a": (0, 1, 1)}, "twice in the table of a"),
        ({"a": (0,)}, "tables"),
    ],
)
def test_the_check_finds_lost_and_doubled_blocks(
    tables: dict[str, tuple[int, ...]], complaint: str
) -> None:
    pool = BlockPool(4)
    assert pool.allocate(2)
    with pytest.raises(AssertionError, match=complaint):
        pool.check(tables)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == (0, 1)
    assert pool.allocate(1, shared=(0, 1)) == (0, 1, 2)
    pool.check({"a": (0, 1), "b": (0, 1, 2)})
    pool.release((0, 1))
    assert (pool.used, pool.free) == (3, 1)
    pool.release((0, 1, 2))
    assert (pool.used, pool.free) == (0, 4)
    pool.check({})


def cached(num_blocks: int, *names: str) -> BlockPool:
    """A pool whose first blocks hold ``names`` and were let go in this order."""
    pool = BlockPool(num_blocks)
    ids = pool.allocate(len(names))
    assert ids is not None
    for block, name in zip(ids, names, strict=True):
        pool.remember(block, name.encode())
    for block in ids:
        pool.release((block,))
    return pool


def test_what_was_let_go_is_found_and_counts_as_free() -> None:
    pool = cached(4, "a", "b")
    assert (pool.free, pool.used) == (4, 0)
    assert pool.find([b"a", b"b", b"c"]) == (0, 1)
    assert pool.find([b"a", b"x", b"b"]) == (0,)
    assert pool.find([b"x"]) == ()
    assert pool.allocate(1, shared=(0, 1)) == (0, 1, 2)
    assert pool.free == 1


def test_a_findable_block_is_given_up_last_and_then_the_longest_unused_first() -> None:
    pool = cached(5, "a", "b", "c")
    assert pool.allocate(2) == (3, 4)
    assert pool.find([b"a"]) == (0,)
    # a is used again, and then let go last.
    assert pool.allocate(0, shared=(0,)) == (0,)
    pool.release((0,))
    assert pool.allocate(2) == (1, 2)
    assert (pool.find([b"b"]), pool.find([b"a"])) == ((), (0,))


def test_of_one_request_the_end_is_given_up_before_the_start() -> None:
    pool = BlockPool(3)
    assert pool.allocate(3) == (0, 1, 2)
    for block, name in enumerate([b"a", b"b", b"c"]):
        pool.remember(block, name)
    pool.release((0, 1, 2))
    assert pool.allocate(1) == (2,)
    assert pool.find([b"a", b"b", b"c"]) == (0, 1)


def test_blocks_to_share_are_not_given_up_for_the_new_ones() -> None:
    pool = cached(3, "a", "b")
    assert pool.allocate(2, shared=(0, 1)) is None
    assert (pool.free, pool.find([b"a", b"b"])) == (3, (0, 1))
    assert pool.allocate(1, shared=(0, 1)) == (0, 1, 2)


def test_a_second_block_of_the_same_content_is_plainly_free_afterwards() -> None:
    pool = BlockPool(2)
    assert pool.allocate(2) == (0, 1)
    pool.remember(0, b"a")
    pool.remember(1, b"a")
    pool.release((0, 1))
    pool.check({})
    assert pool.allocate(1) == (1,)


def test_a_lowered_line_gives_up_what_is_cached_above_it() -> None:
    pool = cached(4, "a", "b", "c")
    pool.set_usable(1)
    assert (pool.free, pool.used_above_line, pool.owned_end) == (1, 0, 1)
    assert pool.find([b"a"]) == (0,)
    assert pool.find([b"b"]) == ()
    pool.set_committed(1)
    pool.check({})


def test_an_owned_block_above_the_line_is_neither_shared_nor_kept() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == (0, 1, 2)
    for block, name in enumerate([b"a", b"b", b"c"]):
        pool.remember(block, name)
    pool.set_usable(2)
    assert pool.find([b"a", b"b", b"c"]) == (0, 1)
    pool.release((0, 1, 2))
    pool.check({})
    pool.set_usable(4)
    assert pool.find([b"c"]) == ()
