"""From the spec to what the tuner may do. In: a Deployment. Out: :class:`Settings`."""

from __future__ import annotations

from plimsoll_operator import runtimes
from plimsoll_operator.spec import Bounds, Deployment
from plimsoll_operator.tuning.values import FIELDS, LANE, Limits, Parameter, Settings

# The default floor of the memory line (the CRD's description promises it).
DEFAULT_MIN_UTILIZATION = 0.50


def tuning_settings(deployment: Deployment) -> Settings:
    """The defaults are those of the CRD: the line never rises above where it starts unless the
    spec allows it, and the length stays as it is without tuning.maxModelLen."""
    engine, tuning = deployment.engine, deployment.tuning
    start = engine.gpu_memory_utilization
    utilization, length = tuning.gpu_memory_utilization, tuning.max_model_len
    lowest, highest = utilization.min_allowed, utilization.max_allowed
    memory_limit, live = deployment.limits.get("memory"), runtimes.live_limits(deployment.runtime)
    if Parameter.GPU_MEMORY_UTILIZATION not in live:
        # Nothing moves it: it is a flag of the pod template, and that is the spec's alone.
        lowest = highest = start
    return Settings(
        mode=tuning.mode,
        start=Limits(max_model_len=engine.max_model_len, gpu_memory_utilization=start),
        min_utilization=min(DEFAULT_MIN_UTILIZATION, start) if lowest is None else lowest,
        max_utilization=start if highest is None else highest,
        tunes_length=length is not None,
        floor=(length or Bounds[int]()).min_allowed,
        ceiling=deployment.ceiling,
        block_size=engine.block_size,
        on_cpu=deployment.on_cpu,
        memory_limit=None if memory_limit is None else str(memory_limit),
        time_to_first_token=tuning.time_to_first_token,
        scrape_interval=deployment.scrape_interval,
        generation=deployment.generation,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        pinned=frozenset(each for each in LANE if _has_flag(engine.extra_args, each)),
        live=live,
        max_restarts_per_day=tuning.max_restarts_per_day,
        drain=deployment.drain,
    )


def _has_flag(arguments: tuple[str, ...], parameter: Parameter) -> bool:
    """Written ``--flag=value`` or as two arguments."""
    flag = "--" + FIELDS[parameter].replace("_", "-")
    return any(argument.partition("=")[0] == flag for argument in arguments)
