"""What each engine is started with; one module per engine.

A runtime's module has ``programs`` (a Deployment to what runs in its pods), ``worker_programs`` (in those
of a group that do not serve) and ``LIVE`` (the limits that move while it serves; any other is read at its
start alone). Only here is known which there are.
"""

from __future__ import annotations

from plimsoll_operator.runtimes import plimsoll, vllm
from plimsoll_operator.runtimes.program import Programs
from plimsoll_operator.spec import Deployment, RuntimeName
from plimsoll_operator.tuning.values import Parameter


def programs(deployment: Deployment) -> Programs:
    """What runs in one pod."""
    if deployment.runtime is RuntimeName.VLLM:
        return vllm.programs(deployment)
    return plimsoll.programs(deployment)


def worker_programs(deployment: Deployment) -> Programs:
    """What runs in each further pod of a group."""
    if deployment.runtime is RuntimeName.VLLM:
        return vllm.worker_programs(deployment)
    return plimsoll.worker_programs(deployment)


def live_limits(runtime: RuntimeName) -> frozenset[Parameter]:
    """The limits that move without a restart."""
    return vllm.LIVE if runtime is RuntimeName.VLLM else plimsoll.LIVE
