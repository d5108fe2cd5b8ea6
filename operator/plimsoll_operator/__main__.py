"""`python -m plimsoll_operator`: runs the operator until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence

import kopf

from plimsoll_operator import handlers as _handlers  # noqa: F401 - registers them
from plimsoll_operator.controller import DEFAULT_ENGINE_IMAGE, Controller, Options

DEFAULT_HEALTH_PORT = 8080


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
        help="serves /healthz (default %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="log every request and event")
    return parser.parse_args(arguments)


def quiet() -> None:
    """Leaves the log to what was decided (report.py) and to what goes wrong: kopf would add a line
    for every watch event, aiohttp one for every probe."""
    for name in ("kopf.objects", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments, os.environ)
    kopf.configure(verbose=options.verbose)
    if not options.verbose:
        quiet()
    kopf.run(
        memo=Controller(Options(engine_image=options.engine_image)),
        # Never the shared peering object, whatever the cluster holds (see handlers.start).
        standalone=True,
        clusterwide=not options.namespace,
        namespaces=options.namespace,
        liveness_endpoint=f"http://0.0.0.0:{options.health_port}/healthz",
    )


if __name__ == "__main__":
    main()
