"""Definitions of kinds that other projects own, out of their pinned Go modules.

In: a module's version and checksum. Out: the CustomResourceDefinition as that release ships it. Nothing of
it is kept in this repository: `go mod download` has it in its cache, or asks the module proxy.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

Json = dict[str, Any]


@dataclass(frozen=True)
class Definition:
    module: str
    version: str
    # As in a go.sum.
    checksum: str
    path: str

    def read(self) -> Json:
        with TemporaryDirectory() as empty:
            done = subprocess.run(
                ["go", "mod", "download", "-json", f"{self.module}@{self.version}"],
                cwd=empty,
                capture_output=True,
                text=True,
                check=False,
            )
        found = json.loads(done.stdout or "{}")
        assert found.get("Sum") == self.checksum, found.get("Error") or done.stderr or found
        body: Json = yaml.safe_load(Path(found["Dir"], self.path).read_text())
        return body


LEADER_WORKER_SET = Definition(
    "sigs.k8s.io/lws",
    "v0.8.0",
    "h1:DdhJ8QabwTfWgbgaHH2gdf8twliioHaoSfmDXRYEVU0=",
    "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
)
INFERENCE_POOL = Definition(
    "sigs.k8s.io/gateway-api-inference-extension",
    "v1.3.0",
    "h1:Ng2Qs1Oum4WycuWyi3rOkAC7pZ2aDqgN2ku6Lr/mryQ=",
    "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
)
