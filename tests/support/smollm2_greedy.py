"""The 32 prompts, what transformers generates for them, and runners of SmolLM2 in float32.

The reference takes minutes. The files that compare with it run in processes of their own, so the
first of them that asks makes it and the others read it from the folder of this test run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.tokenizer import load_tokenizer
from plimsoll_engine.sampling_params import SamplingParams
from support.smollm2 import prepared_snapshot
from support.tiny_models import reference_greedy, reference_model

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a short poem about the sea.",
    "How many legs does a spider have?",
    "Explain photosynthesis to a child in two sentences.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Who wrote Romeo and Juliet?",
)
BEGINNINGS = (
    "Once upon a time",
    "The ship left the harbour at dawn, and",
    "def fibonacci(n):",
    "In 1969, the first humans",
    "Water boils at",
    "The three laws of thermodynamics are",
    "1, 2, 3, 5, 8,",
    "A",
)


@pytest.fixture(scope="module")
def snapshot() -> Path:
    return prepared_snapshot()


@pytest.fixture(scope="module")
def prompts(snapshot: Path) -> list[list[int]]:
    """32 prompts of 1 to about 90 tokens: chats, plain beginnings, and each with text before it."""
    tokenizer = load_tokenizer(EngineConfig(model=str(snapshot))).tokenizer
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    plain = [tokenizer(text)["input_ids"] for text in BEGINNINGS]
    longer = [[*plain[1], *plain[5], *ids] for ids in (*chats, *plain)]
    return [list(ids) for ids in (*chats, *plain, *longer)]


@pytest.fixture(scope="module")
def expected(
    snapshot: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[int, ...]]:
    folder = tmp_path_factory.getbasetemp()
    # A worker's folder is in that of the run.
    shared = (folder.parent if folder.name.startswith("popen-") else folder) / "smollm2.json"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            model = reference_model(snapshot)
            tokens = [reference_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]
            shared.write_text(json.dumps(tokens))
    return [tuple(tokens) for tokens in json.loads(shared.read_text())]


def open_runner(snapshot: Path, block_size: int, **settings: int) -> ModelRunner:
    config = EngineConfig(
        model=str(snapshot),
        device=DeviceType.CPU,
        device_memory=4 << 30,
        block_size=block_size,
        **settings,  # type: ignore[arg-type]
    )
    runner = ModelRunner(config, "cpu")
    runner.load()
    return runner
