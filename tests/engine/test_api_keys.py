"""Several named keys: who may ask, what is counted by name, and that no key is ever shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from plimsoll_engine.config import ConfigError, EngineConfig, parse_api_keys, parse_args
from plimsoll_engine.server.api_keys import ApiKeys, read_api_keys
from support.engine_server import ApiServer, api_server, repeat

KEYS = (("search", "key-of-search"), ("nightly", "key-of-nightly"))


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(repeat("ab"), api_key="key-of-nobody", api_keys=KEYS) as running:
        yield running


def ask(server: ApiServer, key: str, **body: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        answer = client.completions.create(model="m", prompt="abc", **body)
        if body.get("stream"):
            assert list(answer)


def test_use_is_counted_by_name_and_no_key_is_shown(server: ApiServer) -> None:
    ask(server, "key-of-search", max_tokens=4, n=2)
    ask(server, "key-of-nightly", max_tokens=5, stream=True)
    ask(server, "key-of-nobody", max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        ask(server, "key-of-nightly", max_tokens=-1)
    for wrong in ("key-of-searc", "key-of-search2", "Key-of-search", "nightly"):
        with pytest.raises(openai.AuthenticationError):
            ask(server, wrong)
    values = server.metrics()

    def counted(counter: str, name: str, more: str = "") -> float:
        return values[f'plimsoll:api_key_{counter}_total{{api_key="{name}"{more}}}']

    assert counted("requests", "search") == 1
    assert counted("prompt_tokens", "search") == 3
    assert counted("generation_tokens", "search") == 8
    assert counted("requests", "nightly") == 2
    assert counted("generation_tokens", "nightly") == 5
    assert counted("refusals", "nightly", ',code="400"') == 1
    assert counted("generation_tokens", "default") == 1
    assert counted("requests", "unknown") == 4
    assert counted("refusals", "unknown", ',code="401"') == 4
    assert "key-of" not in server.client.get("/metrics").text


def test_a_scheme_is_bearer_in_any_case() -> None:
    keys = ApiKeys(dict(KEYS))
    assert keys.name_of(b"bearer key-of-search") == "search"
    for given in (b"", b"Bearer", b"Bearer ", b"Basic key-of-search", b"key-of-search"):
        assert keys.name_of(given) is None


def test_lines_of_a_file_and_of_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the batch jobs\n\nbatch=a=b==\n")
    arguments = ["--model", "m", "--api-key", "c", "--api-keys-file", str(file)]
    config = parse_args(arguments, {"PLIMSOLL_API_KEYS": "search=x\nnightly=y\n"})
    keys = read_api_keys(config)
    assert keys is not None
    assert keys.names == ("search", "nightly", "batch", "default")
    assert keys.name_of(b"Bearer a=b==") == "batch"
    assert read_api_keys(EngineConfig(model="m")) is None
    assert "api_keys=" not in repr(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1 to 100 lines"),
        ("SECRET", "line 1"),
        ("a b=SECRET", "line 1"),
        ("a=SECRET\n=SECRET2", "line 2"),
        ("default=SECRET", "not default or unknown"),
        ("a=SEC RET", "visible ASCII"),
        ("a=", "visible ASCII"),
        ("a=SECRET\nb=SECRET", "differ"),
        ("a=SECRET\na=SECRET2", "differ"),
        ("\n".join(f"n{n}=SECRET{n}" for n in range(101)), "1 to 100 lines"),
    ],
)
def test_a_bad_line_is_named_and_its_key_is_not(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_api_keys(text)
    assert "SECRET" not in str(refused.value)
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--api-keys-file") as failed:
        read_api_keys(EngineConfig(model="m", api_keys_file=file))
    assert "SECRET" not in str(failed.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_keys": KEYS, "api_key": "key-of-search"}, "a key that no other name has"),
        ({"api_keys_file": Path("/nowhere/keys")}, "No such file"),
    ],
)
def test_sources_that_do_not_go_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failed:
        read_api_keys(EngineConfig(model="m", **settings))  # type: ignore[arg-type]
    assert "key-of" not in str(failed.value)
