"""The chart: what it renders, and what it installs, upgrades and leaves behind (B19, B21)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_local.binaries import Binaries, ensure_binaries
from plimsoll_local.controlplane import Component, ControlPlane
from plimsoll_operator import cluster as api
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.spec import Deployment
from support.apiserver import ApiServer, OperatorProcess, condition_of, until
from support.helm import CHART, PROMETHEUS, Helm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
CRD_NAMES = [
    "llmdeployments.plimsoll.dev",
    "memoryadvisors.plimsoll.dev",
    "memoryprofiles.plimsoll.dev",
]


@pytest.fixture(scope="module")
def binaries() -> Binaries:
    return ensure_binaries()


@pytest.fixture
def helm(binaries: Binaries, tmp_path: Path) -> Helm:
    return Helm(binaries, tmp_path)


def of_kind(bodies: list[Json], kind: str) -> list[Json]:
    return [body for body in bodies if body["kind"] == kind]


def operator_pod(bodies: list[Json]) -> Json:
    (deployment,) = of_kind(bodies, "Deployment")
    pod: Json = deployment["spec"]["template"]
    return pod


class TestRendering:
    def test_it_passes_the_linter(self, helm: Helm) -> None:
        helm("lint", str(CHART), "--strict")

    def test_the_operator_runs_as_asked(self, helm: Helm) -> None:
        pod = operator_pod(helm.render())
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "plimsoll/operator:0.1.0"
        assert container["command"] == ["python", "-m", "plimsoll_operator"]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment["PLIMSOLL_ENGINE_IMAGE"] == "plimsoll/engine:0.1.0"
        for probe, path in (
            ("startupProbe", "/healthz"),
            ("readinessProbe", "/readyz"),
            ("livenessProbe", "/healthz"),
        ):
            assert container[probe]["httpGet"] == {"path": path, "port": "health"}

    def test_the_operators_pod_is_restricted(self, helm: Helm) -> None:
        """What the `restricted` Pod Security level asks for, and a read-only root (B20)."""
        pod = operator_pod(helm.render())["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = [mount["mountPath"] for mount in container["volumeMounts"]]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment["HOME"] in writable

    @pytest.mark.parametrize("release", ["plimsoll", "blue"])
    def test_labels_and_names_agree(self, helm: Helm, release: str) -> None:
        bodies = helm.render(release=release)
        (deployment,) = of_kind(bodies, "Deployment")
        selected = deployment["spec"]["selector"]["matchLabels"].items()
        assert selected <= deployment["spec"]["template"]["metadata"]["labels"].items()
        (account,) = of_kind(bodies, "ServiceAccount")
        (role,) = of_kind(bodies, "ClusterRole")
        (binding,) = of_kind(bodies, "ClusterRoleBinding")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "ops"}
        ]
        pod = deployment["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        assert deployment["metadata"]["name"] == (
            "plimsoll" if release == "plimsoll" else "blue-plimsoll"
        )

    def test_two_releases_share_no_cluster_wide_name(self, helm: Helm) -> None:
        names = [
            {body["metadata"]["name"] for body in of_kind(helm.render(release=r), "ClusterRole")}
            for r in ("blue", "green")
        ]
        assert names[0].isdisjoint(names[1])

    def test_the_definitions_are_those_of_the_repository(self, helm: Helm) -> None:
        crds = of_kind(helm.render(), "CustomResourceDefinition")
        assert [crd["metadata"]["name"] for crd in crds] == CRD_NAMES
        for crd in crds:
            source = yaml.safe_load((ROOT / "crds" / f"{crd['metadata']['name']}.yaml").read_text())
            assert crd["spec"] == source["spec"]
            assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert of_kind(helm.render("--set", "crds.install=false"), crds[0]["kind"]) == []

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            ("image.pullPolicy=Sometimes", "pullPolicy"),
            ("monitoring.alerts.cacheUsage=95", "cacheUsage"),
            ("replicas=-1", "replicas"),
            ("watchNamespaces={Not_A_Name}", "watchNamespaces"),
            ("monitoring.enabled=yes", "enabled"),
            ("leaderWorkerSet.enabled=yes", "enabled"),
            ("monitoring.dashboards.enabled=yes", "enabled"),
            ("monitoring.alerts.for=2 minutes", "for"),
            ("monitoring.alerts.runbookBase=docs", "runbookBase"),
        ],
    )
    def test_a_bad_value_is_refused_by_name(self, helm: Helm, value: str, named: str) -> None:
        assert named in helm.fails("template", "p", str(CHART), "--set", value)


class TestMonitoring:
    def monitoring(self, bodies: list[Json]) -> list[Json]:
        return of_kind(bodies, "PodMonitor") + of_kind(bodies, "PrometheusRule")

    def engines(self, bodies: list[Json]) -> Json:
        monitors = of_kind(bodies, "PodMonitor")
        (monitor,) = (each for each in monitors if each["metadata"]["name"].endswith("-engines"))
        return monitor

    @pytest.mark.parametrize(
        ("arguments", "kinds"),
        [
            ((), []),
            (PROMETHEUS, ["PodMonitor", "PodMonitor", "PrometheusRule"]),
            (("--set", "monitoring.enabled=true"), ["PodMonitor", "PodMonitor", "PrometheusRule"]),
            ((*PROMETHEUS, "--set", "monitoring.enabled=false"), []),
            ((*PROMETHEUS, "--set", "monitoring.alerts.enabled=false"), ["PodMonitor"] * 2),
        ],
    )
    def test_when_it_is_there(
        self, helm: Helm, arguments: tuple[str, ...], kinds: list[str]
    ) -> None:
        assert [body["kind"] for body in self.monitoring(helm.render(*arguments))] == kinds

    @pytest.mark.parametrize("runtime", ["Plimsoll", "VLLM"])
    @pytest.mark.parametrize("release", ["blue", "plimsoll"])
    @pytest.mark.parametrize("override", [("--set", "fullnameOverride=llm"), ()])
    def test_b21_the_monitor_selects_the_pods_that_the_operator_builds(
        self, helm: Helm, release: str, override: tuple[str, ...], runtime: str
    ) -> None:
        bodies = helm.render(
            *override,
            "--set",
            "monitoring.enabled=true",
            "--set",
            "monitoring.labels.release=prom-stack",
            release=release,
        )
        for body in self.monitoring(bodies):
            assert body["metadata"]["labels"]["release"] == "prom-stack"
        monitor = self.engines(bodies)
        template = build_pod_template(deployment(runtime), "plimsoll/engine:0.1.0")
        labels = template["metadata"]["labels"]
        assert monitor["spec"]["namespaceSelector"] == {"any": True}
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (leaders_alone,) = monitor["spec"]["selector"]["matchExpressions"]
        assert leaders_alone["key"] not in labels
        assert set(monitor["spec"]["podTargetLabels"]) <= labels.keys()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        ports = {port["name"] for c in template["spec"]["containers"] for port in c["ports"]}
        assert endpoint["port"] in ports

    def test_the_engines_series_have_both_names_of_the_model(self, helm: Helm) -> None:
        (endpoint,) = self.engines(helm.render(*PROMETHEUS))["spec"]["podMetricsEndpoints"]
        assert endpoint["metricRelabelings"] == [
            {"sourceLabels": ["model_name"], "regex": "(.+)", "targetLabel": "model"}
        ]

    def test_in_listed_namespaces_only_their_pods_are_read(self, helm: Helm) -> None:
        bodies = helm.render(*PROMETHEUS, "--set", "watchNamespaces={a,b}")
        assert self.engines(bodies)["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}

    def test_the_operators_monitor_selects_the_operators_pods(self, helm: Helm) -> None:
        bodies = helm.render(*PROMETHEUS)
        (monitor,) = (m for m in of_kind(bodies, "PodMonitor") if m != self.engines(bodies))
        pod = operator_pod(bodies)
        selected = monitor["spec"]["selector"]["matchLabels"].items()
        assert selected <= pod["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (port,) = pod["spec"]["containers"][0]["ports"]
        assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
        # Else the namespace of a series would be the operator's and not the LLMDeployment's.
        assert endpoint["honorLabels"] is True
        (service,) = of_kind(bodies, "Service")
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert service["spec"]["ports"][0]["targetPort"] == port["name"]

    def test_the_rules_are_those_of_the_file(self, helm: Helm) -> None:
        (rule,) = of_kind(helm.render(*PROMETHEUS), "PrometheusRule")
        source = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
        assert rule["spec"] == source

    def test_values_change_the_cache_alerts_and_where_runbooks_are(self, helm: Helm) -> None:
        # As text, as --set gives it.
        values = ("cacheUsage=0.8", "for=7m", "runbookBase=https://example.org/v1/")
        sets = (f"--set=monitoring.alerts.{value}" for value in values)
        (rule,) = of_kind(helm.render(*PROMETHEUS, *sets), "PrometheusRule")
        before = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
        for group, was in zip(rule["spec"]["groups"], before["groups"], strict=True):
            for now, then in zip(group["rules"], was["rules"], strict=True):
                if "alert" not in now:
                    assert now == then
                    continue
                link = then["annotations"]["runbook_url"].replace(
                    "docs/", "https://example.org/v1/"
                )
                assert now["annotations"]["runbook_url"] == link
                if now["alert"] in ("PlimsollCacheUsageHigh", "PlimsollCachePressure"):
                    assert now["expr"] == then["expr"].replace("> 0.95", "> 0.8")
                    assert (now["for"], then["for"]) == ("7m", "2m")
                else:
                    assert now["expr"] == then["expr"]
                    assert now.get("for") == then.get("for")

    def test_full_alone_is_a_warning_and_with_waiting_somebody_is_called(self, helm: Helm) -> None:
        (rule,) = of_kind(helm.render(*PROMETHEUS), "PrometheusRule")
        alerts = {r.get("alert"): r for group in rule["spec"]["groups"] for r in group["rules"]}
        high, pressure = alerts["PlimsollCacheUsageHigh"], alerts["PlimsollCachePressure"]
        assert high["expr"].endswith("> 0.95")
        assert "{{ $labels.pod }}" in high["annotations"]["summary"]
        assert (high["labels"]["severity"], pressure["labels"]["severity"]) == (
            "warning",
            "critical",
        )

    @pytest.mark.parametrize(
        ("arguments", "there"),
        [
            ((), False),
            (PROMETHEUS, True),
            ((*PROMETHEUS, "--set", "monitoring.dashboards.enabled=false"), False),
            (("--set", "monitoring.dashboards.enabled=true"), True),
        ],
    )
    def test_the_dashboard_is_where_grafana_looks(
        self, helm: Helm, arguments: tuple[str, ...], there: bool
    ) -> None:
        maps = of_kind(helm.render(*arguments), "ConfigMap")
        assert len(maps) == there
        for each in maps:
            assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
            shown = json.loads(each["data"]["plimsoll.json"])
            assert shown == json.loads((CHART / "files" / "dashboard.json").read_text())


def deployment(runtime: str) -> Deployment:
    return Deployment.parse(
        {
            "metadata": {"name": "m", "namespace": "n", "uid": "u", "generation": 1},
            "spec": {"model": {"uri": "hf://org/tiny"}, "runtime": {"name": runtime}},
        }
    )


@pytest.fixture
def control_plane(binaries: Binaries, tmp_path: Path) -> Iterator[ControlPlane]:
    """One of its own, without definitions: to take them from one with objects can last minutes."""
    folder = tmp_path / "control-plane"
    folder.mkdir()
    with ControlPlane(folder, binaries, frozenset({Component.CONTROLLER_MANAGER})) as plane:
        yield plane


@pytest.fixture
def installed(
    binaries: Binaries, control_plane: ControlPlane, server: ApiServer, tmp_path: Path
) -> Iterator[Helm]:
    """The chart in the test's namespace, definitions included."""
    helm = Helm(binaries, tmp_path, control_plane.kubeconfig)
    override = f"--set=fullnameOverride={server.namespace}"
    helm("install", "plimsoll", str(CHART), "--namespace", server.namespace, override)
    helm.kubectl("wait", "--for=condition=Established", *(f"crd/{name}" for name in CRD_NAMES))
    yield helm
    if "plimsoll" in helm("list", "--namespace", server.namespace, "--short"):
        helm("uninstall", "plimsoll", "--namespace", server.namespace)


class TestInstallation:
    async def test_b19_an_upgrade_upgrades_and_an_uninstallation_keeps(
        self, installed: Helm, server: ApiServer, tmp_path: Path
    ) -> None:
        """From a chart of an older schema: the upgrade brings the new one into the cluster, and after
        the uninstallation definition and LLMDeployment are still there."""
        name, old = CRD_NAMES[0], tmp_path / "old"
        shutil.copytree(CHART, old)
        definition = old / "files" / "crds" / f"{name}.yaml"
        crd = yaml.safe_load(definition.read_text())
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        del schema["properties"]["status"]["properties"]["oom"]
        definition.write_text(yaml.safe_dump(crd))

        def upgrade(chart: Path) -> str:
            override = f"--set=fullnameOverride={server.namespace}"
            installed("upgrade", "plimsoll", str(chart), "-n", server.namespace, override)
            return installed.kubectl("get", "crd", name, "-o", "json")

        assert '"oom"' not in upgrade(old)
        await server.create_deployment()
        assert '"oom"' in upgrade(CHART)

        installed("uninstall", "plimsoll", "--namespace", server.namespace)
        assert name in installed.kubectl("get", "crd", "-o", "name")
        await server.deployment()

    @pytest.mark.parametrize("clusterwide", [True, False])
    async def test_the_role_is_what_the_operator_needs(
        self,
        installed: Helm,
        control_plane: ControlPlane,
        server: ApiServer,
        tmp_path: Path,
        clusterwide: bool,
    ) -> None:
        """The real operator, as its own service account, makes every child and the status; what
        the role does not name is forbidden to it, outside of watched namespaces everything."""
        namespace = server.namespace
        watched = () if clusterwide else (namespace,)
        if not clusterwide:
            values = ("--reuse-values", f"--set=watchNamespaces={{{namespace}}}")
            installed("upgrade", "plimsoll", str(CHART), "-n", namespace, *values)
        kubeconfig = _as_service_account(installed, control_plane, server.namespace, tmp_path)
        expected = {"StatefulSet", "Service", "Secret", "ConfigMap", "NetworkPolicy"}

        async def complete() -> bool:
            return expected <= {key.split()[0] for key in await server.versions()}

        # One that looks for each kind of target: each may be read.
        kinds = ("Deployment", "StatefulSet", "LeaderWorkerSet")
        for kind in kinds:
            await server.create(
                api.MEMORY_ADVISOR,
                namespace,
                {
                    "apiVersion": "plimsoll.dev/v1alpha1",
                    "kind": "MemoryAdvisor",
                    "metadata": {"name": kind.lower()},
                    "spec": {"targetRef": {"kind": kind, "name": "none"}},
                },
            )

        async def looked() -> bool:
            found = [
                await server.get(api.MEMORY_ADVISOR, namespace, kind.lower()) for kind in kinds
            ]
            reasons = [condition_of(each or {}, "TargetFound").get("reason") for each in found]
            return reasons == ["NotFound"] * len(kinds)

        operator = await _start_operator(kubeconfig, namespace, watched)
        try:
            await server.create_deployment()
            await server.wait_for("Progressing")
            await until(complete, 30)
            await until(looked, 30)
        finally:
            await operator.stop()
        assert "forbidden" not in operator.log.lower()
        assert "permission" not in operator.log.lower()

        account = f"system:serviceaccount:{server.namespace}:{server.namespace}"
        for verb, resource in (
            ("update", "llmdeployments.plimsoll.dev"),
            ("patch", "llmdeployments.plimsoll.dev"),
            ("delete", "llmdeployments.plimsoll.dev"),
            ("delete", "memoryprofiles.plimsoll.dev"),
            ("patch", "memoryadvisors.plimsoll.dev"),
            ("patch", "deployments.apps"),
            ("patch", "leaderworkersets.leaderworkerset.x-k8s.io"),
            ("list", "secrets"),
            ("create", "pods"),
            ("update", "customresourcedefinitions"),
        ):
            with pytest.raises(AssertionError, match="no"):
                installed.kubectl("auth", "can-i", verb, resource, f"--as={account}", "-A")
        for verb, resource in (
            ("watch", "llmdeployments.plimsoll.dev"),
            ("get", "secrets"),
            ("create", "statefulsets.apps"),
        ):
            elsewhere = ("auth", "can-i", verb, resource, f"--as={account}", "-n", "default")
            if clusterwide:
                installed.kubectl(*elsewhere)
            else:
                with pytest.raises(AssertionError, match="no"):
                    installed.kubectl(*elsewhere)


async def _start_operator(
    kubeconfig: Path, namespace: str, watched: tuple[str, ...]
) -> OperatorProcess:
    """As the chart runs it, with a Lease beside it; ``watched`` empty: for the whole cluster."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "plimsoll_operator",
        f"--health-port={port}",
        "--leader-elect",
        "--network-policy",
        f"--lease-name={namespace}",
        f"--lease-namespace={namespace}",
        *(f"--namespace={name}" for name in watched),
        env={
            **os.environ,
            "KUBECONFIG": os.fspath(kubeconfig),
            "POD_NAMESPACE": namespace,
        },
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    return OperatorProcess(process, port)


def _as_service_account(helm: Helm, plane: ControlPlane, namespace: str, folder: Path) -> Path:
    """A kubeconfig with a token of the operator's service account and nothing else."""
    config = yaml.safe_load(plane.kubeconfig.read_text())
    token = helm.kubectl("create", "token", namespace, "--namespace", namespace).strip()
    context = next(c for c in config["contexts"] if c["name"] == config["current-context"])
    config["users"] = [{"name": context["context"]["user"], "user": {"token": token}}]
    path = folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path
