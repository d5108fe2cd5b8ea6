"""Without --max-model-len: the length that fits is shown, enforced, and really served."""

from __future__ import annotations

import pytest

from support.engine_server import api_server, repeat


@pytest.mark.parametrize("num_blocks", [2, 3, 20])
def test_one_ceiling_is_shown_enforced_and_served(num_blocks: int) -> None:
    with api_server(repeat("ab"), num_blocks=num_blocks, max_model_len=None) as server:
        [ceiling] = {
            each["max_model_len"] for each in server.client.get("/v1/models").json()["data"]
        }
        # The model's own is 8192.
        assert ceiling == (num_blocks - 1) * 16
        for prompt, output in ((ceiling, 1), (ceiling - 1, 2)):
            refused = server.post(
                "/v1/completions", model="m", prompt=[1] * prompt, max_tokens=output
            )
            assert refused.status_code == 400
            assert f"maximum context length is {ceiling} tokens" in refused.text
        for prompt, output in ((ceiling - 1, 1), (1, ceiling - 1)):
            answer = server.complete(prompt=[1] * prompt, max_tokens=output, ignore_eos=True)
            assert answer["usage"]["total_tokens"] == ceiling
            assert answer["choices"][0]["finish_reason"] == "length"
