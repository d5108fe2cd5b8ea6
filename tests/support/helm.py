"""The real helm, and the project's chart as it renders."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from plimsoll_local.binaries import Binaries

Json = dict[str, Any]
CHART = Path(__file__).parents[2] / "charts" / "plimsoll"
# As in a cluster with the Prometheus operator.
PROMETHEUS = ("--api-versions", "monitoring.coreos.com/v1")


class Helm:
    """With a home of its own and the cluster of ``kubeconfig``."""

    # helm takes most of a second for each.
    _rendered: ClassVar[dict[tuple[str, ...], list[Json]]] = {}

    def __init__(self, binaries: Binaries, home: Path, kubeconfig: Path | None = None) -> None:
        self._binaries = binaries
        self._environment = {"PATH": os.environ["PATH"], "HOME": os.fspath(home)}
        if kubeconfig is not None:
            self._environment["KUBECONFIG"] = os.fspath(kubeconfig)

    def __call__(self, *arguments: str) -> str:
        """Raises AssertionError with helm's words."""
        return self._run(self._binaries.helm, *arguments)

    def kubectl(self, *arguments: str) -> str:
        return self._run(self._binaries.kubectl, *arguments)

    def fails(self, *arguments: str) -> str:
        with pytest.raises(AssertionError) as refused:
            self(*arguments)
        return str(refused.value)

    def render(self, *arguments: str, release: str = "plimsoll") -> list[Json]:
        call = (release, *arguments)
        if call not in self._rendered:
            text = self("template", release, str(CHART), "--namespace", "ops", *arguments)
            loaded = yaml.load_all(text, Loader=yaml.CSafeLoader)
            self._rendered[call] = [body for body in loaded if body is not None]
        return copy.deepcopy(self._rendered[call])

    def _run(self, program: Path, *arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{program.name} {arguments}: {done.stderr}{done.stdout}"
        return done.stdout
