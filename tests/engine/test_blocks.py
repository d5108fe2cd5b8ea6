import pytest

from plimsoll_engine.blocks import BlockPool


def test_low_ids_go_first_and_come_back_first() -> None:
    pool = BlockPool(4)
    first = pool.allocate("a", 3)
    assert first == (0, 1, 2)
    pool.release("a", (1,))
    assert pool.allocate("b", 2) == (1, 3)
    pool.check({"a": (0, 2), "b": (1, 3)})


def test_an_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate("a", 4) is None
    assert (pool.free, pool.used) == (3, 0)
    pool.check({})


def test_a_lowered_line_stops_new_allocations_at_once() -> None:
    pool = BlockPool(8)
    held = pool.allocate("a", 6)
    pool.set_usable(4)
    assert pool.free == 0
    assert pool.allocate("b", 1) is None
    assert pool.used_above_line == 2
    assert pool.owned_end == 6
    assert held is not None
    pool.check({"a": held})


def test_blocks_above_the_line_are_withdrawn_when_their_owner_lets_go() -> None:
    pool = BlockPool(8)
    held = pool.allocate("a", 6)
    assert held is not None
    pool.set_usable(4)
    pool.release("a", held)
    assert (pool.free, pool.used, pool.used_above_line) == (4, 0, 0)
    assert pool.owned_end == 4
    pool.set_committed(4)
    pool.check({})
    assert pool.allocate("b", 4) == (0, 1, 2, 3)


def test_a_raised_line_gives_withdrawn_blocks_back() -> None:
    pool = BlockPool(8, usable=2)
    assert pool.free == 2
    pool.set_usable(8)
    assert pool.free == 8
    pool.set_committed(10)
    assert pool.free == 8
    pool.set_usable(10)
    assert pool.allocate("a", 10) == tuple(range(10))


def test_memory_cannot_be_taken_from_under_an_owner_or_the_line() -> None:
    pool = BlockPool(8)
    assert pool.allocate("a", 6)
    with pytest.raises(ValueError, match="fewer than usable"):
        pool.set_committed(7)
    pool.set_usable(2)
    with pytest.raises(ValueError, match=r"blocks \[4, 5\] are owned"):
        pool.set_committed(4)
    with pytest.raises(ValueError, match="allowed are 0 to 8"):
        pool.set_usable(9)


def test_only_the_owner_gives_a_block_back_and_a_wrong_release_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate("a", 2)
    with pytest.raises(ValueError, match="block 3 is held by None, not a"):
        pool.release("a", (0, 3))
    with pytest.raises(ValueError, match="block 0 is held by a, not b"):
        pool.release("b", (0,))
    with pytest.raises(ValueError, match="twice"):
        pool.release("a", (0, 0))
    pool.check({"a": (0, 1)})


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({}, "pool"),
        ({"a": (0, 1), "b": (1,)}, "two owners"),
        ({"a": (0,)}, "pool"),
    ],
)
def test_the_check_finds_lost_and_doubled_blocks(
    tables: dict[str, tuple[int, ...]], complaint: str
) -> None:
    pool = BlockPool(4)
    assert pool.allocate("a", 2)
    with pytest.raises(AssertionError, match=complaint):
        pool.check(tables)
