"""Keeps outputs to a grammar: which tokens may come next, row by row (llguidance does the work).

In: a grammar as llguidance's JSON (built by ``server.structured``), compiled before its request is
submitted, and what a request has generated so far. Out: the tokens that may come next, and rows of
logits in which every other one is impossible. With tensor parallelism the two are in different
processes: the one that drives the ranks has the compiled grammars. A request's matcher is only a cache of its output: after a preemption, or when it was
dropped, it is made again from the compiled grammar. This module knows neither HTTP nor the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import llguidance
import numpy as np

from plimsoll_engine.executor import SequenceChunk
from plimsoll_engine.sampling_params import Grammar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from plimsoll_engine.models.tokenizer import ModelTokenizer

# A grammar is a program of a client's. llguidance counts its work in these units; the comments are
# its documentation's speeds.
LIMITS = llguidance.LLParserLimits(
    # 50,000 per ms: some 20 ms to compile.
    initial_lexer_fuel=1_000_000,
    # 14,000 per ms: some 15 ms per token.
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    # 1 to 2 KB each.
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Compiled grammars that are kept without a request: up to 2 MB each.
MAX_RECENT = 16


def find_grammar_error(grammar: str) -> str | None:
    """What is wrong with the grammar, in llguidance's words; None when it compiles."""
    return llguidance.LLMatcher.validate_grammar(grammar, None, limits=LIMITS) or None


class GrammarCompiler:
    """``load_tokenizer`` is called once, with the first grammar: its table takes a second to make.

    Not for several threads at once.
    """

    def __init__(self, load_tokenizer: Callable[[], ModelTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: llguidance.LLTokenizer | None = None
        # Most clients send the same few again and again. Least recently used first.
        self._recent: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, text: str, vocab_size: int) -> llguidance.LLMatcher:
        """Whether it can begin is for the caller to ask of it (``is_error``)."""
        compiled = self._recent.pop(text, None)
        if compiled is None:
            tokenizer = self._tokenizer or self._build_tokenizer(vocab_size)
            # The log is the engine's alone to write.
            compiled = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        self._recent[text] = compiled
        if len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        return compiled

    def _build_tokenizer(self, vocab_size: int) -> llguidance.LLTokenizer:
        # Imports transformers, which takes seconds.
        import llguidance.hf

        loaded = self._load_tokenizer()
        # Either may be larger: a tokenizer without the model's padding, or one made for more models.
        size = max(vocab_size, len(loaded.tokenizer))
        # The server has refused to start without a fast one, and grammars without an end token.
        fast = cast("PreTrainedTokenizerFast", loaded.tokenizer)
        ends = sorted(end for end in loaded.eos_token_ids if end < vocab_size)
        self._tokenizer = llguidance.hf.from_tokenizer(fast, n_vocab=size, eos_token=ends)
        return self._tokenizer


@dataclass(frozen=True)
class Allowed:
    """By request id."""

    # A bit for each token that may come next, in the order of their ids; absent: any may.
    tokens: dict[str, bytes]
    # Why a request cannot go on.
    errors: dict[str, str]


class GrammarMatchers:
    """``capacity`` is how many requests' matchers are kept; fewer than run at once cost time alone."""

    def __init__(self, compiler: GrammarCompiler, capacity: int) -> None:
        self._compiler = compiler
        self._capacity = capacity
        # Least recently used first; how many tokens of the output each has consumed.
        self._matchers: OrderedDict[str, tuple[llguidance.LLMatcher, int]] = OrderedDict()

    def find_allowed(self, chunks: Sequence[SequenceChunk], vocab_size: int) -> Allowed:
        """``vocab_size`` is that of the logits."""
        found = Allowed({}, {})
        for chunk in chunks:
            if chunk.sampling is None or chunk.sampling.grammar is None:
                continue
            name = chunk.request_id
            matcher = self._matcher(chunk, chunk.sampling.grammar, vocab_size)
            bits = None if matcher.is_error() else matcher.compute_bitmask()
            if bits is None or matcher.is_error():
                found.errors[name] = f"the output's grammar cannot go on: {matcher.get_error()}"
            elif not _unpack(bits, vocab_size).any():
                found.errors[name] = "the output's grammar cannot go on: no token of the model fits"
            else:
                found.tokens[name] = bits
        return found

    def _matcher(
        self, chunk: SequenceChunk, grammar: Grammar, vocab_size: int
    ) -> llguidance.LLMatcher:
        output = chunk.output_token_ids
        matcher, consumed = self._matchers.pop(chunk.request_id, (None, 0))
        if matcher is None or consumed > len(output):
            compiled = grammar.compiled or self._compiler.compile(grammar.text, vocab_size)
            # Nothing is consumed by the compiled one: choices and later requests begin with it too.
            matcher, consumed = compiled.deep_copy(), 0
        # With ignore_eos a request goes on behind its end, where only ends follow.
        if not matcher.is_stopped():
            matcher.consume_tokens(list(output[consumed:]))
        self._matchers[chunk.request_id] = matcher, len(output)
        if len(self._matchers) > self._capacity:
            self._matchers.popitem(last=False)
        return matcher


def forbid_others(logits: torch.Tensor, allowed: Sequence[bytes | None]) -> None:
    """Makes impossible, in place in logits [rows, vocab], what ``allowed`` has no bit for; None: a row
    that stays as it is."""
    masks = {
        row: _unpack(bits, logits.shape[1]) == 0
        for row, bits in enumerate(allowed)
        if bits is not None
    }
    if not masks:
        return
    # Imported here: the server's side of grammars needs no torch.
    from plimsoll_engine.transfers import indices, to_device

    rows = indices(list(masks), logits.device)
    forbidden = to_device(np.stack(list(masks.values())), logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))


def _unpack(bits: bytes, vocab_size: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab_size]
