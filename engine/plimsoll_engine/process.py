"""The life of one engine process: start in order, serve, and end with a reason.

In: a valid configuration. Out: the exit status. Whatever goes wrong leaves one termination message
(``termination``) and a non-zero status; only SIGTERM or SIGINT ends in 0, after the requests in
flight have been given time to finish. Nothing listens before the engine can serve.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvloop
from starlette.types import ASGIApp

from plimsoll_engine import __version__
from plimsoll_engine.config import ConfigError, EngineConfig
from plimsoll_engine.control.credentials import CredentialFiles
from plimsoll_engine.control.reports import EngineIdentity
from plimsoll_engine.control.server import ControlServer
from plimsoll_engine.core import EngineCore
from plimsoll_engine.executor import Executor
from plimsoll_engine.grammar import GrammarCompiler
from plimsoll_engine.metrics import EngineMetrics
from plimsoll_engine.server.answers import UsageShown
from plimsoll_engine.server.api_keys import ApiKeys, read_api_keys
from plimsoll_engine.server.app import build_app
from plimsoll_engine.server.grammars import GrammarReader
from plimsoll_engine.server.listener import LAST_BYTES_SECONDS, HttpServer, bind
from plimsoll_engine.server.service import ServedModel, Service
from plimsoll_engine.server.text import TextCodec
from plimsoll_engine.server.validation import read_defaults
from plimsoll_engine.termination import (
    EngineFailure,
    FailureClass,
    Phase,
    write_termination_message,
)

if TYPE_CHECKING:
    from plimsoll_engine.models.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

# A shutdown that takes longer than this hangs: leave without it.
SHUTDOWN_SECONDS = 5.0
CORE_WATCH_SECONDS = 0.1


@dataclass(frozen=True)
class Engine:
    core: EngineCore
    service: Service
    app: ASGIApp
    control: ControlServer | None


def run_engine(
    config: EngineConfig,
    *,
    load_tokenizer: Callable[[EngineConfig], ModelTokenizer] | None = None,
    build_executor: Callable[[EngineConfig], Executor] | None = None,
) -> int:
    """Blocks until the engine has ended; returns the exit status.

    The model's own tokenizer and executor are the default.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_during_start)
    # What is imported and loaded stays, and collections would look through it again and again.
    gc.disable()
    core: EngineCore | None = None
    failure: EngineFailure | None
    try:
        # What can be wrong with the place comes first: it takes no time to find out.
        listener = bind(config.host, config.port)
        control_port = _hold_control_port(config)
        api_keys = read_api_keys(config)
        credentials = None if config.control_dir is None else CredentialFiles(config.control_dir)
        log.info("plimsoll %s: loading %s", __version__, config.model)
        tokenizer = (load_tokenizer or _load_tokenizer)(config)
        metrics = EngineMetrics(config.served_model_name[0])
        core = EngineCore(config, (build_executor or _build_executor)(config), observer=metrics)
        engine = _start_engine(
            config, core, metrics, tokenizer, api_keys, credentials, control_port
        )
        gc.collect()
        gc.freeze()
        gc.enable()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            failure = runner.run(_serve(engine, listener, config.shutdown_timeout))
    except ConfigError as error:
        failure = error.to_failure()
    except EngineFailure as error:
        failure = error
    except Exception as error:
        log.exception("unexpected failure")
        phase = Phase.LOAD if core is None else Phase.SERVING
        message = f"unexpected {type(error).__name__}: {error}"
        failure = EngineFailure(FailureClass.ENGINE_DEAD, phase, message)
    status = 0 if failure is None else failure.exit_status
    _exit_at_the_latest(status)
    if failure is not None:
        _report(failure)
    if core is not None:
        core.stop()
    return status


def _hold_control_port(config: EngineConfig) -> socket.socket | None:
    """Keeps the port until gRPC can take it, which is after seconds of imports."""
    if not config.control_port:
        return None
    host = "127.0.0.1" if config.control_dir is None else "0.0.0.0"
    return bind(host, config.control_port, flag="--control-port")


# Imported where they are needed, not above: a port in use or a missing model should not wait for
# transformers and torch.


def _load_tokenizer(config: EngineConfig) -> ModelTokenizer:
    from plimsoll_engine.models.preview import check_settings
    from plimsoll_engine.models.tokenizer import load_tokenizer

    check_settings(config)
    return load_tokenizer(config)


def _build_executor(config: EngineConfig) -> Executor:
    from plimsoll_engine.runner import build_executor

    return build_executor(config)


def _start_engine(
    config: EngineConfig,
    core: EngineCore,
    metrics: EngineMetrics,
    loaded: ModelTokenizer,
    api_keys: ApiKeys | None,
    credentials: CredentialFiles | None,
    control_port: socket.socket | None,
) -> Engine:
    """Everything but listening. What takes memory of its own comes before the core measures it."""
    from transformers import PreTrainedTokenizerFast

    from plimsoll_engine.runner import device_kind

    device = device_kind(config.device)
    if not isinstance(loaded.tokenizer, PreTrainedTokenizerFast):
        message = f"{config.model} has no fast tokenizer (tokenizer.json), which this engine needs"
        raise EngineFailure(FailureClass.MODEL_LOAD_FAILED, Phase.LOAD, message)
    codec = TextCodec(loaded.tokenizer)
    control = None
    if control_port is not None:
        identity = EngineIdentity(
            __version__, config.served_model_name[0], device, config.tensor_parallel_size
        )
        control_port.close()
        control = ControlServer(
            core,
            identity,
            port=config.control_port,
            credentials=None if credentials is None else credentials.current,
        )
    log.info("loading the weights and planning the memory on %s", device)
    gc.freeze()
    core.start()
    snapshot = core.snapshot()
    metrics.expose(core.snapshot)
    model = ServedModel(
        names=config.served_model_name,
        root=config.model,
        vocab_size=snapshot.model.vocab_size,
        ceiling=snapshot.ceiling,
        defaults=read_defaults(
            loaded.sampling_defaults, loaded.eos_token_ids, snapshot.model.vocab_size
        ),
    )
    service = Service(
        core,
        codec,
        metrics,
        model,
        GrammarReader(
            GrammarCompiler(lambda: loaded),
            vocab_size=model.vocab_size,
            has_end=bool(model.defaults.eos_token_ids),
        ),
        max_sequences=config.max_num_seqs + config.max_num_queued_reqs,
        usage=UsageShown(config.enable_prompt_tokens_details, config.enable_force_include_usage),
    )
    return Engine(core, service, build_app(service, api_keys=api_keys), control)


async def _serve(
    engine: Engine, listener: socket.socket, shutdown_timeout: float
) -> EngineFailure | None:
    """Until a signal (then None, after a drain) or until the core dies (then why)."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = HttpServer(engine.app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    leaving = asyncio.create_task(signals.get())
    if engine.control is not None:
        engine.control.start()
    done: set[asyncio.Task[Any]] = set()
    while not done and engine.core.failure is None:
        done, _ = await asyncio.wait(
            {serving, leaving}, timeout=CORE_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
    if serving.done():
        # uvicorn does not end by itself: it could not listen.
        serving.result()
        raise RuntimeError("the HTTP server ended by itself")
    engine.service.terminating = True
    if engine.control is not None:
        engine.control.set_serving(False)
    if leaving.done() and engine.core.failure is None:
        name = signal.Signals(leaving.result()).name
        await _drain(engine, signals, shutdown_timeout, name)
    failure = engine.core.failure
    _exit_at_the_latest(0 if failure is None else failure.exit_status)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=LAST_BYTES_SECONDS + 1)
    if engine.control is not None:
        engine.control.stop()
    return failure


async def _drain(
    engine: Engine, signals: asyncio.Queue[int], seconds: float, signal_name: str
) -> None:
    """Refuses new requests, waits for the others, then aborts what is left. A second signal
    ends the wait."""
    core = engine.core
    snapshot = core.snapshot()
    log.info(
        "%s: finishing %d running and %d waiting requests within %g s",
        signal_name,
        snapshot.running,
        snapshot.waiting,
        seconds,
    )
    draining = asyncio.ensure_future(asyncio.to_thread(core.drain, seconds))
    hurrying = asyncio.create_task(signals.get())
    await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    finished = draining.done() and draining.result()
    log.info("all requests finished" if finished else "aborting the requests that are left")
    # From here on nothing may take long.
    _exit_at_the_latest(0)
    await asyncio.to_thread(core.stop)


def _report(failure: EngineFailure) -> None:
    try:
        write_termination_message(failure)
    except OSError as error:
        log.warning("the termination message cannot be written: %s", error)


def _leave_during_start(number: int, frame: FrameType | None) -> None:
    # The main thread may be deep in a library, and there is nothing to finish.
    log.info("%s while starting: leaving", signal.Signals(number).name)
    os._exit(0)


def _exit_at_the_latest(status: int) -> None:
    """A clean shutdown is better than none, but a process that hangs in it is worse."""
    timer = threading.Timer(SHUTDOWN_SECONDS, os._exit, [status])
    timer.daemon = True
    timer.start()
