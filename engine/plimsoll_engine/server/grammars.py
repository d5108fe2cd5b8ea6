"""Grammars are read and compiled here, in a worker of their own, before their request is submitted.

In: a request. Out: its compiled grammar, or an ApiError: 400 for one that is bad, 429 when too many
wait for the worker. A grammar is a program of a client's and may take as long as llguidance's limits
let it (``grammar.LIMITS``): neither the event loop nor a step nor the tokenizer waits for that.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from plimsoll_engine.grammar import GrammarCompiler
from plimsoll_engine.sampling_params import Grammar
from plimsoll_engine.server.errors import ApiError
from plimsoll_engine.server.protocol import GenerationRequest
from plimsoll_engine.server.structured import asks_for_form, read_form

# At 60 ms each, the most that was seen, the last of them waits four seconds.
MAX_WAITING = 64


class GrammarReader:
    """``has_end``: the model has an end token, without which no grammar's end could be said."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        vocab_size: int,
        has_end: bool,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._has_end = has_end
        self._max_waiting = max_waiting
        self._waiting = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def read(self, request: GenerationRequest) -> Grammar | None:
        """None: any text. Raises ApiError."""
        if not asks_for_form(request):
            return None
        if self._waiting >= self._max_waiting:
            raise ApiError(
                429,
                f"{self._waiting} requests wait for their grammar to be compiled, as many as may. "
                "Please retry later.",
                headers={"Retry-After": "1"},
            )
        self._waiting += 1
        # Counted until it is done, though its client may be gone.
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._read, request)
        work.add_done_callback(self._done)
        return await asyncio.shield(work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: asyncio.Future[Grammar | None]) -> None:
        self._waiting -= 1
        # Told to whoever waits; nobody may.
        if not work.cancelled():
            work.exception()

    def _read(self, request: GenerationRequest) -> Grammar | None:
        form = read_form(request, has_end=self._has_end)
        if form is None:
            return None
        compiled = self._compiler.compile(form.text, self._vocab_size)
        if compiled.is_error():
            raise ApiError(
                400,
                f"{form.param}: this engine cannot keep to it: {compiled.get_error()}",
                param=form.param,
            )
        return Grammar(form.text, compiled)
