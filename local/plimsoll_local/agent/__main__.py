"""``python -m plimsoll_local.agent``: starts the node agent inside the cluster's namespaces."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from plimsoll_local.agent.agent import AgentConfig, NodeAgent
from plimsoll_local.agent.api import Api
from plimsoll_local.agent.back_off import BackOffPolicy
from plimsoll_local.agent.node import NodeIdentity
from plimsoll_local.agent.quantities import parse_quantity
from plimsoll_local.network import PodNetwork


def parse_capacity(text: str) -> tuple[str, str]:
    """``nvidia.com/gpu=4``: a resource and its quantity."""
    name, separator, amount = text.partition("=")
    try:
        if not name or not separator or parse_quantity(amount) < 0:
            raise ValueError(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be RESOURCE=QUANTITY, for example nvidia.com/gpu=4"
        ) from None
    return name, amount


def parse_args(arguments: list[str] | None = None) -> AgentConfig:
    parser = argparse.ArgumentParser(
        prog="plimsoll_local.agent",
        description="Runs the pods bound to this node as local processes.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="directory for pods and logs")
    parser.add_argument("--images", type=Path, required=True, help="image table (JSON)")
    parser.add_argument("--node-name", default="plimsoll-local")
    parser.add_argument("--node-ip", default="10.244.0.1")
    parser.add_argument("--port", type=int, default=10250, help="for kubectl logs")
    parser.add_argument(
        "--capacity",
        type=parse_capacity,
        action="append",
        default=[],
        metavar="RESOURCE=QUANTITY",
        help="adds to or replaces what this machine has; may be given several times",
    )
    parser.add_argument(
        "--back-off-base", type=float, default=2.0, help="seconds (a kubelet has 10)"
    )
    parser.add_argument(
        "--back-off-cap", type=float, default=30.0, help="seconds (a kubelet has 300)"
    )
    parser.add_argument(
        "--back-off-reset",
        type=float,
        default=600.0,
        help="a container that ran for so many seconds starts from the base again",
    )
    options = parser.parse_args(arguments)
    return AgentConfig(
        kubeconfig=options.kubeconfig,
        directory=options.state.resolve(),
        images=options.images,
        identity=NodeIdentity(options.node_name, options.node_ip, options.port),
        capacity=dict(options.capacity),
        back_off=BackOffPolicy(options.back_off_base, options.back_off_cap, options.back_off_reset),
    )


async def run(config: AgentConfig) -> None:
    api = await Api.connect(config.kubeconfig)
    network = PodNetwork(config.directory / "networks")
    agent = asyncio.create_task(NodeAgent(config, api, network).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, agent.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await agent
    finally:
        await api.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(run(parse_args()))


if __name__ == "__main__":
    main()
