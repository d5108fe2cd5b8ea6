"""The control channel's credentials are rotated by their age, and both are good for a while."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator.__main__ import parse_arguments
from plimsoll_operator.credentials import OVERLAP_SECONDS, make_credentials, renew_credentials
from plimsoll_operator.desired.control_secret import build_control_secret
from plimsoll_operator.observe import read_credentials
from plimsoll_operator.observed import Credentials
from support.resources import NOW, deployment

Json = dict[str, Any]
DAY = 86400.0
PARSED = deployment()
FIRST = make_credentials("assistant", NOW)


def stored(credentials: Credentials) -> Credentials | None:
    """As they are read in the next pass."""
    return read_credentials(build_control_secret(PARSED, credentials))


def renewed(found: Credentials | None, at: float, rotate_after: float | None = DAY) -> Credentials:
    return renew_credentials(found, PARSED, at, rotate_after=rotate_after)


def test_they_stay_until_they_are_old() -> None:
    assert renewed(FIRST, NOW) == FIRST
    assert renewed(FIRST, NOW + DAY - 1) == FIRST
    assert renewed(FIRST, NOW + 1000 * DAY, None) == FIRST


def test_both_are_kept_through_the_overlap_and_no_longer() -> None:
    at = NOW + DAY
    second = renewed(FIRST, at)
    assert second.token != FIRST.token
    assert second.certificate != FIRST.certificate
    # Of the first, what a client needs.
    assert second.previous == Credentials(FIRST.certificate, b"", FIRST.token)
    kept = stored(second)
    assert kept == second
    # Every pass until then finds nothing to do.
    assert renewed(kept, at + OVERLAP_SECONDS - 1) == second
    alone = renewed(kept, at + OVERLAP_SECONDS)
    assert alone == replace(second, previous=None)
    assert stored(alone) == alone
    third = renewed(alone, at + DAY)
    assert third.previous is not None
    assert third.previous.token == second.token


def test_what_the_pods_of_a_group_know_each_other_by_stays() -> None:
    grouped = deployment(parallelism={"tensor": 2, "nodes": 2})
    first = renew_credentials(None, grouped, NOW, rotate_after=DAY)
    second = renew_credentials(first, grouped, NOW + DAY, rotate_after=DAY)
    assert second.token != first.token
    assert second.group == first.group != b""


def test_a_previous_one_that_is_damaged_is_none() -> None:
    secret = build_control_secret(PARSED, renewed(FIRST, NOW + DAY))
    secret["data"]["previous-token"] = ""
    found = read_credentials(secret)
    assert found is not None
    assert found.previous is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("720h", 30 * DAY), ("60s", 60.0), ("0s", None), (None, 30 * DAY)]
)
def test_the_flag(text: str | None, seconds: float | None) -> None:
    arguments = [] if text is None else [f"--rotate-credentials-after={text}"]
    assert parse_arguments(arguments, {}).rotate_credentials_after == seconds


@pytest.mark.parametrize("text", ["59s", "a day", "-1h", "30"])
def test_a_bad_flag_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([f"--rotate-credentials-after={text}"], {})
    said = capsys.readouterr().err
    assert "--rotate-credentials-after" in said
    assert text in said
