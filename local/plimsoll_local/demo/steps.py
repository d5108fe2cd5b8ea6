"""The demo, step by step: from nothing to the table, and back to nothing.

In:  whether to keep the cluster, its name and the seed. Out: everything on the terminal, and the exit
code: 0 when the answer named Paris and the tuned deployment kept its promises (summary.py), 1
otherwise, saying what failed; 130 after Ctrl-C. Whatever happens, the cluster is taken down unless it
is to be kept.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import yaml
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from rich.console import Console

from plimsoll_local import models
from plimsoll_local.binaries import Binaries, cache_home, ensure_binaries
from plimsoll_local.cluster import Cluster, ClusterError
from plimsoll_local.demo import summary
from plimsoll_local.demo.client import Endpoint, Progress, ask, play
from plimsoll_local.demo.commands import CommandFailed, Commands
from plimsoll_local.demo.hints import describe_down, describe_play, find_kubectl
from plimsoll_local.demo.manifests import build_pinned_copy, find_repository, read_example
from plimsoll_local.demo.prompts import PromptWriter
from plimsoll_local.demo.summary import (
    Result,
    describe_losses,
    describe_moves,
    find_broken_promises,
)
from plimsoll_local.demo.timeline import Cost, Timeline
from plimsoll_local.demo.traffic import read_excerpt, shape_burst
from plimsoll_local.demo.view import Side, show
from plimsoll_local.demo.watch import POLL_INTERVAL_S, Watch, find_condition, follow
from plimsoll_local.interrupts import interrupts_deferred

NAMESPACE = "default"
OPERATOR_NAMESPACE = "plimsoll-system"
SERVICE_PORT = 80
READY_DEADLINE_S = 240.0
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"


class DemoFailed(Exception):
    """A step did not do what it should; the message says what was expected and what was seen."""


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    keep: bool = False
    name: str = "plimsoll"
    seed: int = 3


def run(options: Options) -> int:
    """Runs the demo and returns the exit code of the process."""
    console = Console()
    demo = _Demo(options, console)
    try:
        return demo.run()
    except KeyboardInterrupt:
        console.print(demo.describe_stop(), highlight=False, markup=False, soft_wrap=True)
        return 130


class _Demo:
    """One run. `run` has the order of its steps; each step is a method below it."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._timeline = Timeline(console)
        self._repository = find_repository()
        self._example = read_example(self._repository)
        self._pinned = build_pinned_copy(self._example)
        self._started = False

    def run(self) -> int:
        # 1. what is made once: the control plane's programs, the model
        # 2. a cluster, the operator by helm, the example by kubectl
        # 3. one question
        # 4. the burst, against a pinned copy and the tuned example at once
        # 5. the table and the verdict
        #
        # Up to the cluster outside the event loop, which would hear of a Ctrl-C only between steps.
        binaries = self._build_binaries()
        model = self._prepare_model()
        with self._cluster() as cluster:
            broken = asyncio.run(self._play(cluster, binaries, model))
        self._conclude(broken)
        if self._options.keep:
            self._tell_how_to_play(cluster, binaries)
        return 1 if broken else 0

    async def _play(
        self, cluster: Cluster, binaries: Binaries, model: models.PreparedModel
    ) -> list[str]:
        """Everything that happens on the cluster; returns what failed."""
        commands = Commands(
            binaries.kubectl, binaries.helm, cluster.kubeconfig_path, self._timeline.say
        )
        broken: list[str] = []
        try:
            await self._install_operator(commands)
            async with _connect(cluster.kubeconfig_path) as api:
                await self._apply(commands, api, self._example, model)
                broken += await self._ask(cluster)
                await self._apply(commands, api, self._pinned, model)
                results = await self._replay_burst(cluster, api, model)
            broken += self._report(results)
        except (DemoFailed, CommandFailed, ClusterError) as error:
            broken.append(str(error))
            await self._show_evidence(commands)
        return broken

    def describe_stop(self) -> str:
        """What an interrupt has left, as it is found and not as it was meant."""
        if not self._started:
            return "stopped before a cluster was started"
        cluster = Cluster.find(self._options.name)
        if cluster.directory.exists() or cluster.processes():
            return f"stopped; some of the cluster is left: {describe_down(cluster.name)}"
        return "stopped; the cluster is gone"

    def _build_binaries(self) -> Binaries:
        with self._timeline.step("build the control plane, or find it built", Cost.FIRST_RUN):
            return ensure_binaries(self._timeline.say)

    def _prepare_model(self) -> models.PreparedModel:
        with self._timeline.step("prepare the model, or find it prepared", Cost.FIRST_RUN):
            return models.ensure_prepared(cache_home() / "models", self._timeline.say)

    @contextmanager
    def _cluster(self) -> Iterator[Cluster]:
        """A cluster for the body. Interrupted, it is not kept: nobody would expect one."""
        keep = self._options.keep
        with self._timeline.step("start the cluster"):
            self._started = True
            cluster = Cluster.up(self._options.name, self._timeline.say, tied=not keep)
        try:
            yield cluster
        except KeyboardInterrupt:
            keep = False
            raise
        finally:
            if not keep:
                # A second Ctrl-C must not skip it.
                with interrupts_deferred(), self._timeline.step("take the cluster down"):
                    cluster.down()

    async def _install_operator(self, commands: Commands) -> None:
        with self._timeline.step("install the operator"):
            chart = self._repository / "charts" / "plimsoll"
            await commands.helm(
                "install", "plimsoll", str(chart), "--namespace", OPERATOR_NAMESPACE,
                "--create-namespace", "--wait", "--timeout", "120s",
            )  # fmt: skip

    async def _apply(
        self,
        commands: Commands,
        api: kubernetes_client.ApiClient,
        deployment: dict[str, Any],
        model: models.PreparedModel,
    ) -> None:
        """Applies the example (by its file, as a user would) or the pinned copy; waits for Ready."""
        name = deployment["metadata"]["name"]
        with self._timeline.step(f"deploy {name}"):
            if deployment is self._example:
                volume = models.build_volume(model.home, NAMESPACE)
                document = "\n---\n".join(json.dumps(part) for part in volume)
                await commands.kubectl("apply", "-f", "-", stdin=document)
                manifest = self._repository / "manifests" / "llmdeployment.yaml"
                await commands.kubectl("apply", "-f", str(manifest))
            else:
                await commands.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(deployment))
            await self._wait_until_ready(Watch(api, NAMESPACE, name), name)
            self._timeline.say((await commands.kubectl("get", "llmd", name)).rstrip())

    async def _wait_until_ready(self, watch: Watch, name: str) -> None:
        deadline = time.monotonic() + READY_DEADLINE_S
        said = ""
        while True:
            resource = await watch.get_resource()
            ready = find_condition(resource, "Ready")
            if ready is not None and ready["status"] == "True":
                return
            stalled = find_condition(resource, "Stalled")
            if stalled is not None and stalled["status"] == "True":
                raise DemoFailed(f"{name} is stalled: {stalled.get('message')}")
            message = str((ready or {}).get("message") or "the operator has not looked at it yet")
            if time.monotonic() > deadline:
                raise DemoFailed(f"{name} is not Ready after {READY_DEADLINE_S:.0f} s: {message}")
            if message != said:
                self._timeline.say(message)
                said = message
            await asyncio.sleep(1)

    async def _ask(self, cluster: Cluster) -> list[str]:
        name = self._example["metadata"]["name"]
        with self._timeline.step("ask a question"):
            with cluster.proxy(NAMESPACE, name, SERVICE_PORT) as url:
                try:
                    answer = await ask(self._endpoint(url), QUESTION)
                except openai.OpenAIError as error:
                    raise DemoFailed(f"the question was not answered: {error}") from error
            self._timeline.say(f"Q: {QUESTION}")
            self._timeline.say(f"A: {answer}")
        return [] if EXPECTED in answer else [f"the answer does not name {EXPECTED}: {answer!r}"]

    def _endpoint(self, url: str) -> Endpoint:
        return Endpoint(f"{url}/v1", self._example["spec"]["model"]["uri"].removeprefix("hf://"))

    async def _replay_burst(
        self, cluster: Cluster, api: kubernetes_client.ApiClient, model: models.PreparedModel
    ) -> tuple[Result, Result]:
        """The same burst against both at once, one thread each; (pinned, tuned)."""
        seed = self._options.seed
        arrivals = shape_burst(read_excerpt(), seed)
        writer = PromptWriter(model.snapshot)
        messages = [
            writer.write(arrival.prompt_tokens, seed + arrival.number) for arrival in arrivals
        ]
        with self._timeline.step(f"replay a burst of {len(arrivals)} requests, seed {seed}"):
            started = time.monotonic()
            async with AsyncExitStack() as stack:
                http = await stack.enter_async_context(aiohttp.ClientSession())
                sides, watches, players = [], [], []
                for title, deployment in (("pinned", self._pinned), ("tuned", self._example)):
                    name = deployment["metadata"]["name"]
                    url = stack.enter_context(cluster.proxy(NAMESPACE, name, SERVICE_PORT))
                    side = Side(title, Progress(total=len(arrivals)))
                    watch = Watch(api, NAMESPACE, name)
                    sides.append(side)
                    watches.append(follow(watch, http, url, side.note))
                    players.append(play(arrivals, messages, self._endpoint(url), side.progress))
                async with _running_beside(
                    *watches, show(self._console, sides, lambda: time.monotonic() - started)
                ):
                    accounts = await asyncio.gather(*players)
                    # The last reading is taken after the last answer.
                    await asyncio.sleep(2 * POLL_INTERVAL_S)
            pinned, tuned = (
                Result(side.title, account, side.reading, side.lowest_free_bytes)
                for side, account in zip(sides, accounts, strict=True)
            )
        return pinned, tuned

    def _report(self, results: tuple[Result, Result]) -> list[str]:
        self._console.print()
        self._console.print(summary.build_table(results))
        self._console.print(summary.compare(*results), highlight=False, markup=False)
        for result in results:
            self._print_list(
                f"What the tuner did to the {result.title} deployment", describe_moves(result)
            )
            self._print_list(
                f"What clients of the {result.title} deployment saw instead of an answer",
                describe_losses(result),
            )
        return find_broken_promises(results[1])

    def _print_list(self, title: str, lines: list[str]) -> None:
        if lines:
            self._console.print(f"{title}:", highlight=False)
            for line in lines:
                self._console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)

    async def _show_evidence(self, commands: Commands) -> None:
        """What the cluster looks like now; helps to understand a failure after the cluster is gone."""
        for arguments in (
            ("get", "llmd,pods", "--all-namespaces"),
            ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
            ("logs", "--namespace", OPERATOR_NAMESPACE, "deployment/plimsoll", "--tail=30"),
        ):
            with suppress(CommandFailed):
                output = await commands.kubectl(*arguments)
                self._console.print(output, markup=False, highlight=False, soft_wrap=True)

    def _conclude(self, broken: list[str]) -> None:
        self._console.print()
        self._console.print(self._timeline.build_table())
        for line in broken:
            self._console.print(
                f"FAILED: {line}", style="red", highlight=False, markup=False, soft_wrap=True
            )
        if not broken:
            self._console.print(
                f"The answer named {EXPECTED}; the tuned deployment answered every request and "
                "had no OOM kill.",
                highlight=False,
            )

    def _tell_how_to_play(self, cluster: Cluster, binaries: Binaries) -> None:
        lines = describe_play(
            self._options.name,
            cluster.kubeconfig_path,
            find_kubectl(binaries.kubectl),
            f"{NAMESPACE}/{self._example['metadata']['name']}:{SERVICE_PORT}",
        )
        # Commands are to be copied: a line must not be broken where the window ends.
        self._console.print(
            "\n  ".join(["The cluster is still up:", *lines]),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


@asynccontextmanager
async def _connect(kubeconfig: Path) -> AsyncIterator[kubernetes_client.ApiClient]:
    configuration = kubernetes_client.Configuration()
    await kubernetes_config.load_kube_config(
        config_file=str(kubeconfig), client_configuration=configuration
    )
    async with kubernetes_client.ApiClient(configuration) as api:
        yield api


@asynccontextmanager
async def _running_beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs coroutines that never end while the body runs. One that fails is raised at the end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ended:
        if isinstance(end, Exception):
            raise end
