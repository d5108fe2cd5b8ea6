"""Keeps outputs to a grammar: which tokens may come next, row by row (llguidance does the work).

In: a grammar as llguidance's JSON (built by ``server.structured``), compiled before its request is
submitted, and what a request has generated so far. Out: rows of logits in which every other token is
impossible. A request's matcher is only a cache of its output: after a preemption, or when it was
dropped, it is made again from the compiled grammar. This module knows neither HTTP nor the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import llguidance
import numpy as np

from plimsoll_engine.sampling_params import Grammar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from plimsoll_engine.models.tokenizer import ModelTokenizer
    from plimsoll_engine.sampling import RowRequest

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


class GrammarMatchers:
    """``capacity`` is how many requests' matchers are kept; fewer than run at once cost time alone."""

    def __init__(self, compiler: GrammarCompiler, capacity: int) -> None:
        self._compiler = compiler
        self._capacity = capacity
        # Least recently used first; how many tokens of the output each has consumed.
        self._matchers: OrderedDict[str, tuple[llguidance.LLMatcher, int]] = OrderedDict()

    def constrain(self, logits: torch.Tensor, requests: Sequence[RowRequest]) -> dict[int, str]:
        """Makes impossible, in place in logits [rows, vocab], what each row's grammar forbids.

        Returns what went wrong by row: such a request cannot go on.
        """
        errors, forbidden = {}, {}
        vocab = int(logits.shape[1])
        for row, request in enumerate(requests):
            if request.params.grammar is not None:
                matcher = self._matcher(request, request.params.grammar, vocab)
                allowed = None if matcher.is_error() else matcher.compute_bitmask()
                if allowed is None or matcher.is_error():
                    errors[row] = f"the output's grammar cannot go on: {matcher.get_error()}"
                    continue
                bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")[:vocab]
                if bits.any():
                    forbidden[row] = bits == 0
                else:
                    errors[row] = "the output's grammar cannot go on: no token of the model fits"
        if forbidden:
            _mask(logits, forbidden)
        return errors

    def _matcher(
        self, request: RowRequest, grammar: Grammar, vocab_size: int
    ) -> llguidance.LLMatcher:
        output = request.output_token_ids
        matcher, consumed = self._matchers.pop(request.request_id, (None, 0))
        if matcher is None or consumed > len(output):
            compiled = grammar.compiled or self._compiler.compile(grammar.text, vocab_size)
            # Nothing is consumed by the compiled one: choices and later requests begin with it too.
            matcher, consumed = compiled.deep_copy(), 0
        # With ignore_eos a request goes on behind its end, where only ends follow.
        if not matcher.is_stopped():
            matcher.consume_tokens(list(output[consumed:]))
        self._matchers[request.request_id] = matcher, len(output)
        if len(self._matchers) > self._capacity:
            self._matchers.popitem(last=False)
        return matcher


def _mask(logits: torch.Tensor, forbidden: Mapping[int, np.ndarray]) -> None:
    # Imported here: the server's side of grammars needs no torch.
    from plimsoll_engine.transfers import indices, to_device

    rows = indices(list(forbidden), logits.device)
    masks = to_device(np.stack(list(forbidden.values())), logits.device)
    logits[rows] = logits[rows].masked_fill_(masks, float("-inf"))
