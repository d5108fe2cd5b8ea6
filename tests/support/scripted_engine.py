"""``python -m support.scripted_engine SCENARIO FLAGS...``: a whole engine process without a model.

Everything is the engine's own (flags, HTTP, control channel, signals, exit status) but for the
executor, which is scripted, and the tokenizer. Scenarios say what goes wrong.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from plimsoll_engine.config import EngineConfig, parse_args
from plimsoll_engine.executor import ModelLimits, StepBatch
from plimsoll_engine.models.tokenizer import ModelTokenizer
from plimsoll_engine.process import run_engine
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase
from support.engine_server import END, byte_tokenizer, repeat, spell
from support.scripted_executor import ScriptedExecutor, figures

# A step takes this long, so that a request of a hundred tokens is a second or so in flight.
STEP_SECONDS = 0.01
# The step in which a scenario's fault happens.
FAULT_STEP = 20


class Scenario(ScriptedExecutor):
    def __init__(self, fault: Callable[[], None] | None = None) -> None:
        super().__init__(
            repeat("abcdefgh"), memory_figures=figures(256), before_step=self._before_step
        )
        self._fault = fault
        self._steps = 0

    def _before_step(self, batch: StepBatch) -> None:
        time.sleep(STEP_SECONDS)
        self._steps += 1
        if self._fault is not None and self._steps == FAULT_STEP:
            self._fault()


class SlowLoad(Scenario):
    def load(self) -> ModelLimits:
        print("LOADING", flush=True)
        threading.Event().wait(60)
        return super().load()


class HangingShutdown(Scenario):
    def shutdown(self) -> None:
        threading.Event().wait(60)


def lose_the_device() -> None:
    raise EngineFailure(
        FailureClass.DEVICE_FAULT, Phase.SERVING, "the device fell off the bus", {"xid": 79}
    )


def hit_a_bug() -> None:
    raise ZeroDivisionError("a bug")


def fail_to_load(config: EngineConfig) -> ScriptedExecutor:
    raise RuntimeError("no such device")


SCENARIOS: dict[str, Callable[[EngineConfig], ScriptedExecutor]] = {
    "serve": lambda config: Scenario(),
    "device-fault": lambda config: Scenario(lose_the_device),
    "bug": lambda config: Scenario(hit_a_bug),
    "slow-load": lambda config: SlowLoad(),
    "hanging-shutdown": lambda config: HangingShutdown(),
    "load-error": fail_to_load,
}


def load_tokenizer(config: EngineConfig) -> ModelTokenizer:
    tokenizer = byte_tokenizer()
    return ModelTokenizer(tokenizer, frozenset(spell(tokenizer, END)))


def main() -> int:
    scenario, *flags = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    return run_engine(
        parse_args(flags, os.environ),
        load_tokenizer=load_tokenizer,
        build_executor=SCENARIOS[scenario],
    )


if __name__ == "__main__":
    os._exit(main())
