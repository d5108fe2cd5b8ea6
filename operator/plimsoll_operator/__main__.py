"""`python -m plimsoll_operator`: runs the operator until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence

import kopf

from plimsoll_operator import handlers as _handlers  # noqa: F401 - registers them
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.controller import DEFAULT_ENGINE_IMAGE, Controller, Options
from plimsoll_operator.endpoints import Readiness, serve
from plimsoll_operator.leadership import Leadership, LeadershipLostError, LeaseName
from plimsoll_operator.redaction import RedactingFilter
from plimsoll_operator.spec import InvalidSpec, parse_duration
from plimsoll_operator.telemetry import Telemetry

DEFAULT_HEALTH_PORT = 8080
DEFAULT_LEASE_NAME = "plimsoll"
DEFAULT_ROTATION = "720h"
SHORTEST_ROTATION_SECONDS = 60.0

logger = logging.getLogger(__name__)


def parse_arguments(
    arguments: Sequence[str] | None, environ: Mapping[str, str]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m plimsoll_operator",
        description="Runs LLMDeployments and keeps their memory limits where the traffic is safe.",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="watch this namespace only; may be repeated (default: the whole cluster)",
    )
    parser.add_argument(
        "--engine-image",
        default=environ.get("PLIMSOLL_ENGINE_IMAGE") or DEFAULT_ENGINE_IMAGE,
        metavar="IMAGE",
        help="for deployments that name none (PLIMSOLL_ENGINE_IMAGE; default %(default)s)",
    )
    parser.add_argument(
        "--health-port",
        type=int,
        default=DEFAULT_HEALTH_PORT,
        metavar="PORT",
        help="serves /healthz, /readyz and /metrics (default %(default)s)",
    )
    parser.add_argument(
        "--network-policy",
        action="store_true",
        help="open the engines' control port to the operator's pods in POD_NAMESPACE alone",
    )
    parser.add_argument(
        "--rotate-credentials-after",
        type=_interval,
        default=DEFAULT_ROTATION,
        metavar="DURATION",
        help="age at which certificate and token of an engine's control channel are replaced, such as "
        f"720h; 0s: never (default {DEFAULT_ROTATION})",
    )
    parser.add_argument(
        "--leader-elect",
        action="store_true",
        help="work only while holding a Lease; several operators stand by for each other",
    )
    parser.add_argument(
        "--lease-name", default=DEFAULT_LEASE_NAME, metavar="NAME", help="default %(default)s"
    )
    parser.add_argument(
        "--lease-namespace",
        default=environ.get("POD_NAMESPACE") or "default",
        metavar="NAME",
        help="of the Lease (POD_NAMESPACE; default %(default)s)",
    )
    parser.add_argument(
        "--identity",
        # A container that is restarted in its pod goes on with the pod's Lease at once.
        default=environ.get("POD_NAME") or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        metavar="NAME",
        help="of this operator in the Lease (POD_NAME; default: host name and a random suffix)",
    )
    parser.add_argument("--verbose", action="store_true", help="log every request and event")
    options = parser.parse_args(arguments)
    options.operator_namespace = environ.get("POD_NAMESPACE") if options.network_policy else None
    if options.network_policy and not options.operator_namespace:
        parser.error(
            "--network-policy: POD_NAMESPACE is not set; expected the operator's namespace"
        )
    return options


def _interval(text: str) -> float | None:
    """None for never. Engines that have not read one Secret must not miss two."""
    try:
        seconds = parse_duration("--rotate-credentials-after", text)
    except InvalidSpec as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if 0 < seconds < SHORTEST_ROTATION_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not allowed; expected 0s (never), or {SHORTEST_ROTATION_SECONDS:g}s and more"
        )
    return seconds or None


def quiet() -> None:
    """Leaves the log to what was decided (report.py) and to what goes wrong: kopf would add a line
    for every watch event, aiohttp one for every probe."""
    for name in ("kopf.objects", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


async def run(options: argparse.Namespace) -> None:
    """Until a signal. Raises LeadershipLostError; OSError when the health port is taken."""
    telemetry = Telemetry()
    leadership: Leadership | None = None

    async def work() -> None:
        telemetry.leader.set(1)
        controller = Controller(
            Options(
                options.engine_image,
                tuple(options.namespace),
                options.operator_namespace,
                options.rotate_credentials_after,
            ),
            telemetry=telemetry,
        )
        await kopf.operator(
            memo=controller,
            # Never the shared peering object, whatever the cluster holds (see handlers.start).
            standalone=True,
            clusterwide=not options.namespace,
            namespaces=options.namespace,
        )

    def judge_readiness() -> Readiness:
        if leadership is None or leadership.leads:
            return Readiness(True, "working")
        if leadership.holder is None:
            return Readiness(False, "the Lease has not been read yet")
        return Readiness(True, f"standby: {leadership.holder} leads")

    async with serve(options.health_port, telemetry, judge_readiness):
        if not options.leader_elect:
            await work()
            return
        # kopf listens to signals itself, from when it runs.
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        cluster = await Cluster.connect(telemetry)
        try:
            lease = LeaseName(options.lease_namespace, options.lease_name)
            leadership = Leadership(cluster, lease, options.identity)
            await leadership.run(work)
        finally:
            await cluster.close()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments, os.environ)
    kopf.configure(verbose=options.verbose)
    for handler in logging.getLogger().handlers:
        handler.addFilter(RedactingFilter())
    if not options.verbose:
        quiet()
    try:
        asyncio.run(run(options))
    except LeadershipLostError as error:
        # Whatever this process still has in memory may be out of date: start anew, on standby.
        logger.error("%s", error)
        sys.exit(1)
    except (asyncio.CancelledError, KeyboardInterrupt):
        logger.info("told to stop while on standby")


if __name__ == "__main__":
    main()
