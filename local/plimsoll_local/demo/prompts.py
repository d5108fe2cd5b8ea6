"""Words for the arrivals: chats whose prompt has exactly the planned number of tokens.

In:  a prepared model's snapshot folder (tokenizer.json, chat_template.jinja) and a number of tokens.
Out: one user message; with the chat template around it the prompt has that many tokens.

Every filler word is one token when a space stands before it, so the length is known without trial;
it is counted once more all the same, and a miscount is an error. Knows nothing of servers.
"""

import json
import random
from pathlib import Path

import jinja2
from tokenizers import Tokenizer

QUESTION = "Say in a few words what this list is about:"

FILLERS = (
    "time water people world house school work place number part ship sea wind sail harbor line "
    "cargo load depth weight balance storm coast river bridge engine steam iron wood rope anchor "
    "captain crew voyage map star north south east west morning evening winter summer market price "
    "trade law letter book story music color light sound stone mountain forest field bread milk"
)


class PromptWriter:
    """Writes user messages of an exact prompt length for one model."""

    def __init__(self, snapshot: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(snapshot / "tokenizer.json"))
        environment = jinja2.Environment(autoescape=False)
        self._template = environment.from_string((snapshot / "chat_template.jinja").read_text())
        names = json.loads((snapshot / "tokenizer_config.json").read_text())
        self._bos, self._eos = names.get("bos_token"), names.get("eos_token")
        self._fillers = [word for word in FILLERS.split() if self._is_one_token(f" {word}")]
        if not self._fillers:
            raise ValueError(f"no filler word is a single token for the model in {snapshot}")
        self._overhead = self.count(QUESTION)

    def count(self, message: str) -> int:
        """Tokens of the whole prompt when `message` is the only user message."""
        text = self._template.render(
            messages=[{"role": "user", "content": message}],
            add_generation_prompt=True,
            bos_token=self._bos,
            eos_token=self._eos,
        )
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def write(self, tokens: int, seed: int) -> str:
        """A user message that makes a prompt of `tokens` tokens; the seed chooses the words.

        Raises ValueError when the template and the question alone are longer than that.
        """
        if tokens < self._overhead:
            raise ValueError(f"tokens is {tokens}; the shortest prompt has {self._overhead}")
        chooser = random.Random(seed)
        words = chooser.choices(self._fillers, k=tokens - self._overhead)
        message = "".join([QUESTION, *(f" {word}" for word in words)])
        counted = self.count(message)
        if counted != tokens:
            raise ValueError(f"a prompt of {tokens} tokens was asked for, {counted} were made")
        return message

    def _is_one_token(self, text: str) -> bool:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids) == 1
