"""The life of one gate process: bind, serve, drain at a signal.

In: a valid configuration. Out: the exit status: 0 after SIGTERM or SIGINT alone. An upstream that is
not there yet, or no longer, ends nothing: it is told to clients and probes until it answers.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket

import uvloop
from aiohttp import web

from plimsoll_engine import __version__
from plimsoll_engine.config import ConfigError
from plimsoll_engine.control.credentials import CredentialFiles
from plimsoll_engine.control.server import ControlChannel
from plimsoll_engine.gate.app import GateApp
from plimsoll_engine.gate.config import GateConfig
from plimsoll_engine.gate.control import ControlledGate
from plimsoll_engine.gate.counter import TokenCounter, load_tokenizer
from plimsoll_engine.gate.gate import Gate
from plimsoll_engine.gate.limits import GateLimits
from plimsoll_engine.gate.upstream import Upstream
from plimsoll_engine.limits import Limits, LimitsFileError, merge_limits, read_limits_file
from plimsoll_engine.server.listener import bind, listen
from plimsoll_engine.termination import write_termination_message

log = logging.getLogger(__name__)

OBSERVE_SECONDS = 2.0
# For the last bytes of what was served when the listener closes.
LAST_BYTES_SECONDS = 2.0


def run_gate(config: GateConfig) -> int:
    """Blocks until the gate has ended; returns the exit status."""
    try:
        listener = bind(config.host, config.port)
        credentials = None if config.control_dir is None else CredentialFiles(config.control_dir)
        limits = read_limits(config)
        tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            upstream = Upstream(config.upstream, api_key=config.api_key)
            gate = Gate(
                upstream,
                TokenCounter(upstream, tokenizer),
                limits,
                max_model_len=config.max_model_len,
                max_waiting=config.max_num_queued_reqs,
                max_waiting_tokens=config.max_num_queued_tokens,
            )
            runner.run(_serve(config, gate, listener, credentials))
    except ConfigError as error:
        failure = error.to_failure()
        write_termination_message(failure)
        return failure.exit_status
    return 0


def read_limits(config: GateConfig) -> GateLimits:
    """The flags', moved by the limits file where there is one. Raises ConfigError."""
    limits = GateLimits(
        Limits(
            max_num_seqs=config.max_num_seqs,
            long_prompt_tokens=config.long_prompt_tokens,
            long_prompt_share=config.long_prompt_share,
            long_queue_share=config.long_queue_share,
        ),
        0,
        floor=config.min_model_len,
    )
    if config.limits_file is None:
        return limits
    try:
        found = read_limits_file(config.limits_file)
    except LimitsFileError as error:
        raise ConfigError("--limits-file", config.limits_file, f"limits ({error})") from None
    if found is not None:
        limits.revision, left = found
        # The others in it are the upstream's own flags.
        own = Limits(
            max_model_len=left.max_model_len,
            max_num_seqs=min(left.max_num_seqs or config.max_num_seqs, config.max_num_seqs),
            long_prompt_tokens=left.long_prompt_tokens,
            long_prompt_share=left.long_prompt_share,
            long_queue_share=left.long_queue_share,
        )
        limits.current = merge_limits(limits.current, own)
    return limits


async def _serve(
    config: GateConfig,
    gate: Gate,
    listener: socket.socket,
    credentials: CredentialFiles | None,
) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    app = GateApp(gate, max_body=config.max_body, api_key=config.api_key)
    control = None
    if config.control_port:
        control = ControlChannel(
            ControlledGate(gate, loop),
            port=config.control_port,
            credentials=None if credentials is None else credentials.current,
        )
    async with gate.upstream:
        runner = build_runner(app)
        await runner.setup()
        listen(listener)
        await web.SockSite(runner, listener).start()
        observing = asyncio.create_task(_observe_on(gate))
        if control is not None:
            control.start()
        # What is here stays: looking through it again and again only makes clients wait.
        gc.collect()
        gc.freeze()
        log.info("plimsoll %s: the gate before %s is open", __version__, config.upstream)
        await signals.get()
        app.terminating = True
        if control is not None:
            control.set_serving(False)
        log.info("finishing %d requests and %d that wait", gate.running, gate.waiting)
        draining = asyncio.create_task(gate.drain(config.shutdown_timeout))
        hurrying = asyncio.create_task(signals.get())
        await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurrying, observing):
            task.cancel()
        await runner.cleanup()
        if control is not None:
            await asyncio.to_thread(control.stop)


def build_runner(app: GateApp) -> web.ServerRunner:
    """A handler is cancelled when its client leaves: its place is free at once."""
    server = web.Server(app, handler_cancellation=True, access_log=None)
    return web.ServerRunner(server, shutdown_timeout=LAST_BYTES_SECONDS)


async def _observe_on(gate: Gate) -> None:
    while True:
        await gate.observe()
        await asyncio.sleep(OBSERVE_SECONDS)
