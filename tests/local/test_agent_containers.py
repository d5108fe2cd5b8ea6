"""Containers as real processes in real namespaces: memory limits, file system, endings."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_local.agent.memory import MAX_INTERVAL, MIN_INTERVAL, poll_interval, sum_fields
from plimsoll_local.agent.rootfs import directories_to_rebuild
from support.container_scenarios import MEBIBYTE, run_scenario


@pytest.mark.parametrize(
    ("used", "interval"),
    [
        (0, MAX_INTERVAL),
        (100 * MEBIBYTE, MAX_INTERVAL),
        (495 * MEBIBYTE, 0.025634765625),  # 105 MiB are left: at 4 GiB/s, 26 ms
        (590 * MEBIBYTE, MIN_INTERVAL),
        (700 * MEBIBYTE, MIN_INTERVAL),
    ],
)
def test_the_nearer_the_limit_the_sooner_the_next_look(used: int, interval: float) -> None:
    assert poll_interval(used, 600 * MEBIBYTE) == interval


def test_fields_are_summed_and_absent_ones_are_nothing() -> None:
    status = b"Name:\tx\nRssAnon:\t    1024 kB\nRssFile:\t 7 kB\nRssShmem:\t  2 kB\n"
    assert sum_fields(status, (b"RssAnon:", b"RssShmem:")) == 1026 * 1024
    assert sum_fields(b"Name:\tzombie\n", (b"RssAnon:",)) == 0


def test_only_parents_of_missing_mount_points_are_rebuilt(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    parents = {"/", *map(str, tmp_path.parents), str(tmp_path)}
    assert directories_to_rebuild([str(tmp_path / "there")]) == {"/"}
    assert directories_to_rebuild([str(tmp_path / "link")]) == parents
    assert directories_to_rebuild([str(tmp_path / "a" / "b")]) == parents | {str(tmp_path / "a")}


@pytest.mark.e2e
class TestRealContainers:
    def test_fast_growth_is_killed_close_to_the_limit(self, tmp_path: Path) -> None:
        seen = run_scenario("allocation", tmp_path)
        assert (seen["exit_code"], seen["out_of_memory"]) == (137, True)
        # 600 MiB/s are 6 MiB in 10 ms; the rest is for a busy machine's scheduler.
        assert seen["limit"] < seen["peak_memory"] < seen["limit"] + 64 * MEBIBYTE

    def test_pages_shared_by_forks_count_once(self, tmp_path: Path) -> None:
        seen = run_scenario("sharing", tmp_path)
        assert (seen["exit_code"], seen["out_of_memory"]) == (0, False)
        assert seen["output"] == ["survived"]

    def test_pages_that_forks_no_longer_share_count_each(self, tmp_path: Path) -> None:
        seen = run_scenario("unsharing", tmp_path)
        assert (seen["exit_code"], seen["out_of_memory"]) == (137, True)

    def test_files_in_memory_count(self, tmp_path: Path) -> None:
        seen = run_scenario("memory_files", tmp_path)
        assert (seen["exit_code"], seen["out_of_memory"]) == (137, True)

    def test_the_machine_is_seen_but_not_written(self, tmp_path: Path) -> None:
        seen = run_scenario("file_system", tmp_path)
        assert seen == {
            "exit_code": 0,
            "output": [
                "pod-0",
                "1.2.3.4 here",
                "Read-only file system",
                "yes",
                "yes",
                "Read-only file system",
                "yes",
                "Read-only file system",  # shown although it is below /tmp
                "False",  # the agent's own directory is hidden
                "1 [1]",
            ],
            "message": "the end",
            "on_the_machine": False,
        }

    def test_exit_codes(self, tmp_path: Path) -> None:
        seen = run_scenario("endings", tmp_path)
        assert seen["codes"] == {"own": 3, "term": 143, "kill": 137, "ignored": -1}
        assert 'exec: "no-such-program": executable file not found' in seen["failed"]

    def test_a_program_inside_a_container(self, tmp_path: Path) -> None:
        seen = run_scenario("execution", tmp_path)
        assert seen == {"output": "hello\n", "failing": 4, "missing": 127, "timed_out": True}

    def test_nothing_outlives_the_agent(self, tmp_path: Path) -> None:
        assert run_scenario("orphans", tmp_path) == {"before": 3, "after": 0}
