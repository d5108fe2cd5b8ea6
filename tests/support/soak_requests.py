"""What a soak (soak.py) sends: a model that can be compared, its prompts, and requests of every kind.

In: a source of randomness. Out: bodies, with the text that each must give. Pure but for the model's files.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from support.tiny_model import write_tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,0123456789"
# Status, and what is sent to get it.
BROKEN: tuple[tuple[int, str, bytes], ...] = (
    (400, "/v1/completions", b"{"),
    (400, "/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
    (400, "/v1/completions", b'{"prompt": [999999]}'),
    (400, "/v1/completions", b'{"prompt": ""}'),
    (400, "/v1/chat/completions", b'{"messages": []}'),
    (400, "/v1/chat/completions", b"\xff\xfe"),
    (404, "/v1/completions", b'{"model": "other", "prompt": "a"}'),
    (404, "/v2/nothing", b"{}"),
)


@dataclass(frozen=True)
class Reference:
    """A prompt of one character per token, and the greedy answer to it, likewise."""

    prompt: str
    answer: str
    # The chat message that becomes this prompt, when there is one.
    message: str | None


def write_soak_model(folder: Path) -> Path:
    """A tiny model that says characters of ASCII alone, so that a text tells its tokens."""
    write_tiny_model(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    said = {vocabulary[letter] for letter in LETTERS if letter != " "}
    # The embedding is tied: a row of zeros has the logit 0, below the best of the others.
    for token_id in set(range(257)) - said:
        tensors["model.embed_tokens.weight"][token_id] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def compose(chance: random.Random, reference: Reference) -> tuple[dict[str, Any], str, str]:
    """A request of some kind, its path, and the text that it must give."""
    answer = reference.answer
    max_tokens = len(answer)
    body: dict[str, Any] = {"priority": chance.choice([0, 0, 0, 1])}
    if chance.random() < 0.3:
        max_tokens = chance.randint(1, len(answer))
    answer = answer[:max_tokens]
    if chance.random() < 0.2:
        at = chance.randrange(len(answer))
        stop = answer[at : at + chance.randint(1, 4)]
        body["stop"] = [stop, "never said"]
        answer = answer[: answer.index(stop)]
    if chance.random() < 0.2:
        body["n"] = chance.randint(2, 4)
    if chance.random() < 0.5:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    body["max_tokens"] = max_tokens
    if reference.message is not None and chance.random() < 0.7:
        body["messages"] = [{"role": "user", "content": reference.message}]
        if chance.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
        return body, "/v1/chat/completions", answer
    body["prompt"] = reference.prompt
    if chance.random() < 0.3:
        body["logprobs"] = chance.randint(0, 5)
    if chance.random() < 0.1 and "n" not in body and len(reference.prompt) < 700:
        body["echo"] = True
        answer = reference.prompt + answer
    return body, "/v1/completions", answer


def text_of(choice: dict[str, Any]) -> str:
    """Of a choice of either API, whole or streamed."""
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def describe(document: dict[str, Any]) -> str:
    text = json.dumps(document)
    return text if len(text) < 300 else f"{text[:140]} ... {text[-140:]}"


def write_text(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(LETTERS, k=length))
