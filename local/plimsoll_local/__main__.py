"""`plimsoll-local`: a Kubernetes in local processes, and the demo on it.

Exit status 0 when it did what was asked, 1 when not (with the reason on stderr), 2 for a bad call.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from plimsoll_local.binaries import MissingTool, find_binaries
from plimsoll_local.cluster import Cluster, ClusterError, NoAnswer
from plimsoll_local.namespace import NamespacesUnavailable

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
# Between two looks whether what a proxy leads to is still there.
PROXY_INTERVAL_S = 2.0
STOPS = {signal.SIGINT, signal.SIGTERM}
Name = Annotated[str, typer.Option(help="The cluster's name.")]


@app.command()
def up(name: Name = "plimsoll") -> None:
    """Start a cluster and wait until its node is Ready."""
    cluster = Cluster.up(name)
    print(f"cluster {name!r} is up\n  export KUBECONFIG={cluster.kubeconfig_path}")
    binaries = find_binaries()
    if binaries is not None and shutil.which("kubectl") is None:
        print(f"  export PATH={binaries.kubectl.parent}:$PATH")


@app.command()
def down(name: Name = "plimsoll") -> None:
    """End a cluster and everything that runs in it."""
    cluster = Cluster.find(name)
    if not cluster.directory.exists():
        print(f"no cluster named {name!r}")
        return
    cluster.down()
    print(f"cluster {name!r} is down")


@app.command()
def status(name: Name = "plimsoll") -> None:
    """Show whether a cluster runs and what runs in it."""
    cluster = Cluster.find(name)
    if not cluster.running:
        print(f"cluster {name!r} is not up")
        raise typer.Exit(1)
    table = Table("namespace", "pod", "phase", "restarts", title=f"cluster {name}")
    for pod in cluster.get("/api/v1/pods")["items"]:
        states = pod["status"].get("containerStatuses", [])
        table.add_row(
            pod["metadata"]["namespace"],
            pod["metadata"]["name"],
            pod["status"].get("phase", "Pending"),
            str(sum(state.get("restartCount", 0) for state in states)),
        )
    Console().print(table)
    print(f"{len(cluster.processes())} processes; KUBECONFIG={cluster.kubeconfig_path}")


@app.command()
def kubeconfig(name: Name = "plimsoll") -> None:
    """Print the path of a cluster's kubeconfig."""
    cluster = Cluster.find(name)
    if not cluster.running:
        raise ClusterError(f"cluster {name!r} is not up; `plimsoll-local up` starts it")
    print(cluster.kubeconfig_path)


@app.command()
def proxy(
    service: Annotated[str, typer.Argument(help="NAMESPACE/SERVICE:PORT, as default/chat:80")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The loopback port; 0 takes a free one.")
    ] = 0,
    name: Name = "plimsoll",
) -> None:
    """Lead a loopback port to a Service of the cluster, until interrupted or the Service is gone."""
    namespace, slash, rest = service.partition("/")
    target, colon, number = rest.rpartition(":")
    if not slash or not colon or not number.isdigit():
        raise typer.BadParameter(f"{service!r}: expected NAMESPACE/SERVICE:PORT")
    cluster, where = Cluster.find(name), (namespace, target, int(number))
    # Before the relay's thread starts: it would be interrupted instead.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    with cluster.proxy(*where, port) as url:
        address = cluster.find_address(*where)
        print(f"{url} leads to {service}; Ctrl-C ends it", flush=True)
        while signal.sigtimedwait(STOPS, PROXY_INTERVAL_S) is None:
            if not cluster.running:
                raise ClusterError(f"cluster {name!r} is gone, and the way to {service} with it")
            with contextlib.suppress(NoAnswer):
                if cluster.find_address(*where) != address:
                    raise ClusterError(f"{service} was made anew; start the proxy again")


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster up.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the burst.")] = 3,
    name: Name = "plimsoll",
) -> None:
    """Serve a real model, overload it, and show what the operator does about it."""
    from plimsoll_local.demo.steps import Options, run

    raise typer.Exit(run(Options(keep=keep, name=name, seed=seed)))


def main() -> None:
    try:
        app()
    except (ClusterError, MissingTool, NamespacesUnavailable) as error:
        print(f"plimsoll-local: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
