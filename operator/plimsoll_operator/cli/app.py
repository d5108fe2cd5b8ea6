"""Inspect and steer Plimsoll's LLMDeployments: what the tuner does, why, and what a manifest becomes.

Exit status 0 when all is well, 1 when a problem was found, 2 for a call that cannot be carried out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from plimsoll_operator import __version__
from plimsoll_operator.cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    from plimsoll_operator.cli.mode import Patch
    from plimsoll_operator.cli.server import Server

Json = dict[str, Any]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help=__doc__,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Wide enough for a line per LLMDeployment where nobody's terminal says otherwise.
_PIPED_WIDTH = 220
_TRIES = 3


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Kubeconfig = Annotated[
    str | None, typer.Option(help="The kubeconfig file (default: KUBECONFIG, ~/.kube/config).")
]
Context = Annotated[str | None, typer.Option(help="The kubeconfig's context to use.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="The namespace (default: the context's).")
]
AllNamespaces = Annotated[
    bool, typer.Option("--all-namespaces", "-A", help="Every namespace that you may read.")
]
Format = Annotated[Output, typer.Option("--output", "-o", help="How to print it.")]
Name = Annotated[str, typer.Argument(help="Name of the LLMDeployment.")]
# Also the default of the operator that the chart of this version installs.
ENGINE_IMAGE = f"plimsoll/engine:{__version__}"


@app.command()
def plan(
    file: Annotated[
        str, typer.Option("--file", "-f", help="The manifest; - reads standard input.")
    ],
    model_config: Annotated[
        str | None,
        typer.Option(help="config.json, a folder with one, or a hub name org/name to fetch it."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of one accelerator, such as 80GiB.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Its model instead, such as H100-80G.")] = None,
    engine_image: Annotated[
        str, typer.Option(help="The image of deployments that name none.")
    ] = ENGINE_IMAGE,
    namespace: Namespace = None,
    output: Format = Output.TABLE,
) -> None:
    """What a manifest would become: children, first steps, and the byte budget of one accelerator.

    Needs no cluster. With -o yaml the children alone are printed. The rules over several fields are
    the API server's: kubectl apply --dry-run=server -f FILE.
    """
    from plimsoll_operator.budget.model import InvalidModel, UnknownFamily, read_model_shape
    from plimsoll_operator.cli import manifests
    from plimsoll_operator.cli import plan as planning
    from plimsoll_operator.cli.sizing import find_device, size_deployment
    from plimsoll_operator.spec import Deployment, InvalidSpec

    plans, problem = [], False
    for resource in manifests.read_deployments(file, namespace):
        try:
            deployment = Deployment.parse(resource)
        except InvalidSpec as error:
            raise UsageError(f"{file}: {error}") from error
        model, unknown = None, None
        where = model_config or manifests.local_model(deployment)
        if where is not None:
            try:
                config = manifests.read_model_config(where, deployment.model.revision)
                model = read_model_shape(config)
            except UnknownFamily as error:
                unknown = (
                    f"unknown: {where}: {error}. The engine measures what others take at start"
                )
            except InvalidModel as error:
                raise UsageError(f"{where}: {error}") from error
        device = find_device(deployment, gpu_memory, gpu)
        sized, unsized, does_not_work = size_deployment(deployment, model, device)
        plans.append(planning.build_plan(deployment, engine_image, sized, unknown or unsized))
        problem = problem or does_not_work
    if output is Output.YAML:
        children = [body for each in plans for body in each.children]
        print(yaml.safe_dump_all(children, sort_keys=False), end="")
    elif output is Output.JSON:
        _print_data([planning.to_json(each) for each in plans], output)
    else:
        print("\n\n".join(planning.render(each) for each in plans))
    if problem:
        raise typer.Exit(1)


@app.command()
def top(
    once: Annotated[bool, typer.Option(help="Print the table once, for scripts.")] = False,
    watch: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Seconds between two looks.")
    ] = 5.0,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Format = Output.TABLE,
) -> None:
    """A live table of every LLMDeployment: limits in force, load, and what the tuner did last."""
    from dataclasses import asdict

    from plimsoll_operator.cli import top as table

    server = _connect(kubeconfig, context, namespace, all_namespaces)
    if output is not Output.TABLE:
        rows = table.build_rows(server.deployments(), time.time())
        _print_data([asdict(row) for row in rows], output)
        return
    console = _console()
    if once or not console.is_terminal:
        rows = table.build_rows(server.deployments(), time.time())
        console.print(table.render(rows) if rows else f"no LLMDeployment {_where(server)}")
        return

    def look() -> Group:
        title = f"{_where(server)}, every {watch:g} s, Ctrl-C ends"
        try:
            body: Any = table.render(table.build_rows(server.deployments(), time.time()))
        except CommandError as error:
            body = Text(str(error), style="red")
        return Group(Text(title, style="dim"), body)

    _show_live(console, look, watch)


def _show_live(console: Console, look: Callable[[], Group], seconds: float) -> None:
    live = Live(look(), console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), live:
        while True:
            time.sleep(seconds)
            live.update(look(), refresh=True)


@app.command()
def explain(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Format = Output.TABLE,
) -> None:
    """Why these values: from the spec and what was learned to the last decision, in plain words."""
    from plimsoll_operator.cli import explain as explaining
    from plimsoll_operator.cli.profiles import find_learned
    from plimsoll_operator.cli.view import read_view

    server = _connect(kubeconfig, context, namespace)
    view, now = read_view(server.deployment(name)), time.time()
    learned, profile = find_learned(server, view)
    sections = explaining.explain(view, learned, profile, now)
    if output is Output.TABLE:
        print(explaining.render(view, sections))
        return
    _print_data({section.title: list(section.lines) for section in sections}, output)


@app.command()
def advice(
    name: Annotated[
        str | None, typer.Argument(help="Name of a MemoryAdvisor; without it, all of them.")
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Format = Output.TABLE,
) -> None:
    """What MemoryAdvisors would change of vLLM that runs already, why, and what it would save."""
    from dataclasses import asdict

    from plimsoll_operator.cli import advice as advising

    server = _connect(kubeconfig, context, namespace, all_namespaces)
    if name is None:
        rows = advising.build_rows(server.advisors())
        if output is not Output.TABLE:
            _print_data([asdict(row) for row in rows], output)
            return
        text = advising.render_table(rows) if rows else f"no MemoryAdvisor {_where(server)}"
        _console().print(text)
        return
    if all_namespaces:
        raise UsageError("--all-namespaces excludes a name")
    resource = server.advisor(name)
    sections = advising.explain(resource, time.time())
    if output is Output.TABLE:
        print(advising.render(resource, sections))
        return
    _print_data({section.title: list(section.lines) for section in sections}, output)


@app.command()
def history(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Format = Output.TABLE,
) -> None:
    """The tuner's last decisions, oldest first, each with its reason and what came of it."""
    from plimsoll_operator.cli import history as past
    from plimsoll_operator.cli.view import read_view

    view = read_view(_connect(kubeconfig, context, namespace).deployment(name))
    if output is Output.TABLE:
        print(past.render(view, time.time()))
        return
    _print_data(past.build_entries(view), output)


@app.command()
def pin(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the YAML that would make today's values permanent. Applies nothing."""
    from plimsoll_operator.cli import pin as pinning
    from plimsoll_operator.cli.view import read_view

    view = read_view(_connect(kubeconfig, context, namespace).deployment(name))
    print(pinning.render(view, time.time()), end="")


@app.command()
def hold(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Set spec.tuning.mode to Hold: what is in force stays, and nothing is moved."""
    from plimsoll_operator.cli import mode

    _change_mode(_connect(kubeconfig, context, namespace), name, mode.hold)


@app.command()
def resume(
    name: Name,
    to: Annotated[
        str | None,
        typer.Option("--mode", help="The mode to go to, where hold has recorded none."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Go back to the mode that was there before `hold`."""
    from plimsoll_operator.cli import mode
    from plimsoll_operator.spec import TuningMode

    if to is not None and to not in tuple(TuningMode):
        raise UsageError(f"--mode is {to}; allowed: {', '.join(TuningMode)}")
    wanted = None if to is None else TuningMode(to)
    server = _connect(kubeconfig, context, namespace)
    _change_mode(server, name, lambda resource: mode.resume(resource, wanted))


def _change_mode(server: Server, name: str, change: Callable[[Json], Patch]) -> None:
    """The operator writes status all the time: a conflict is met by reading again."""
    from plimsoll_operator.cli.server import Conflict
    from plimsoll_operator.resources import LLM_DEPLOYMENT

    for left in reversed(range(_TRIES)):
        patch = change(server.deployment(name))
        try:
            if patch.body is not None:
                server.patch(server.path(LLM_DEPLOYMENT, name), patch.body)
        except Conflict:
            if not left:
                raise
            continue
        print(patch.text)
        return


@app.command()
def doctor(
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Format = Output.TABLE,
) -> None:
    """Check definitions, operator, permissions, versions and whether metrics are reachable."""
    from dataclasses import asdict

    from plimsoll_operator.cli import doctor as checks
    from plimsoll_operator.cli.definitions import own_definitions
    from plimsoll_operator.cli.diagnosis import gather

    server = _connect(kubeconfig, context, namespace, all_namespaces)
    own = own_definitions()
    findings = checks.diagnose(gather(server, own), own, __version__)
    if output is Output.TABLE:
        print(checks.render(findings))
    else:
        _print_data([{**asdict(f), "level": f.level.value} for f in findings], output)
    if checks.found_problem(findings):
        raise typer.Exit(1)


@app.command()
def simulate(
    trace: Annotated[str, typer.Option(help="CSV with t_s,input_tokens,output_tokens; .gz too.")],
    gpu: Annotated[str, typer.Option(help="The accelerator, such as L40S or A100-80G.")],
    model: Annotated[str, typer.Option(help="A hub name org/name, a config.json, or its folder.")],
    out: Annotated[str, typer.Option(help="The report to write.")] = "plimsoll-report.html",
    replicas: Annotated[int, typer.Option(min=1, help="How many share the traffic.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of what is left to chance.")] = 3,
    inject: Annotated[str, typer.Option(help="A burst on top: B1 to B9 (docs/evaluation.md).")] = (
        "B0"
    ),
) -> None:
    """What Plimsoll would do with your traffic, and what it would save: some lines and a picture.

    Needs no cluster and no GPU: the real scheduler and tuner run in virtual time on a simulated one.
    """
    from plimsoll_operator.cli.manifests import read_model_config
    from plimsoll_operator.cli.simulate import require_simulator, run_report

    require_simulator()
    config = read_model_config(model, None, "--model")
    options = ["--trace", trace, "--gpu", gpu, "--out", out, "--inject", inject]
    options += ["--replicas", str(replicas), "--seeds", str(seeds)]
    if status := run_report(config, model, options):
        raise typer.Exit(status)


@app.command()
def version() -> None:
    """Print the version of this command."""
    print(__version__)


def _connect(
    kubeconfig: str | None,
    context: str | None,
    namespace: str | None,
    all_namespaces: bool = False,
) -> Server:
    # Only here: the client library takes its time, and `plan` needs no cluster.
    from plimsoll_operator.cli.server import Server, Target

    if namespace is not None and all_namespaces:
        raise UsageError("--namespace and --all-namespaces exclude each other")
    return Server.connect(Target(kubeconfig, context, namespace, all_namespaces))


def _where(server: Server) -> str:
    return "in any namespace" if server.namespace is None else f"in namespace {server.namespace}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


def _print_data(data: object, output: Output) -> None:
    if output is Output.JSON:
        print(json.dumps(data, indent=2, default=str))
    else:
        print(yaml.safe_dump(data, sort_keys=False), end="")


def run(arguments: list[str] | None = None) -> int:
    """The exit status; never a traceback for what the user or the cluster did."""
    try:
        app(args=arguments, prog_name="kubectl plimsoll", standalone_mode=True)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except BrokenPipeError:
        # The reader has seen enough; what is left must not be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
