"""Builds an image with buildah and tries it: size, user, --help, health and the list of its parts.

In: Dockerfile.operator or Dockerfile.engine, and uv.lock. Out: an image in buildah's storage, what was
seen in it, and beside each other in --output the image as an archive and its SBOM. Exits 1 when
something does not hold. ``--base debian`` makes the base from Debian's packages with mmdebstrap, for
machines that reach no registry of images. Knows no other builder: docker build takes the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.1.0"
DEBIAN_BASE = "localhost/plimsoll-base:bookworm"
SUITE = "bookworm"
# python3-venv makes the environment, usr-is-merged spares perl.
PACKAGES = ("python3", "python3-venv", "ca-certificates", "usr-is-merged")
UNUSED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*")
SBOM = "opt/plimsoll/sbom.cdx.json"
MB = 1_000_000


@dataclass(frozen=True)
class Image:
    name: str
    # Uncompressed, in MB. None: not promised.
    largest: int | None
    # A program that exits 0 when its process in the container says that it is healthy.
    health: str


# As kubelet asks: a server that listens and whose loop turns. The operator needs no API server for it.
OPERATOR_HEALTH = """
import json, os, subprocess, sys, time, urllib.request
config = {"apiVersion": "v1", "kind": "Config", "current-context": "none",
          "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
          "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
          "users": [{"name": "none", "user": {}}]}
json.dump(config, open("/tmp/kubeconfig", "w"))
program = [sys.executable, "-m", "plimsoll_operator", "--leader-elect", "--health-port", "18080"]
process = subprocess.Popen(program, env=os.environ | {"KUBECONFIG": "/tmp/kubeconfig"})
for _ in range(300):
    try:
        print(urllib.request.urlopen("http://127.0.0.1:18080/healthz").read().decode().strip())
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit("/healthz did not answer in 30 s")
process.terminate()
process.wait(20)
"""
ENGINE_HEALTH = "import torch, plimsoll_engine.server.app; print('torch', torch.__version__)"

IMAGES = {
    image.name: image
    for image in (
        Image("operator", 250, OPERATOR_HEALTH),
        Image("engine", None, ENGINE_HEALTH),
    )
}


class Failed(Exception):
    """What did not hold, with the figure."""


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(
        [str(part) for part in command], check=False, stdout=subprocess.PIPE, text=True, **options
    )
    if done.returncode != 0:
        raise Failed(f"`{' '.join(map(str, command[:3]))} ...` ended with {done.returncode}")
    return done.stdout.strip()


def make_debian_base() -> str:
    """The name of an image with Python, made anew from Debian's packages."""
    with tempfile.TemporaryDirectory() as folder:
        excluded = [f"--dpkgopt=path-exclude={path}" for path in UNUSED]
        run(
            *(
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                "--aptopt=Apt::Install-Recommends false",
            ),
            *("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", *excluded),
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
            *(f"--include={','.join(PACKAGES)}", SUITE, f"{folder}/base.tar"),
        )
        Path(folder, "Dockerfile").write_text(
            "FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n"
        )
        run("buildah", "build", "--quiet", "--tag", DEBIAN_BASE, folder)
    return DEBIAN_BASE


def build(image: Image, tag: str, base: str | None, variant: str, ca: str | None) -> None:
    arguments = [f"VERSION={VERSION}", f"REVISION={revision()}"]
    if base is not None:
        arguments.append(f"BASE={base}")
    if image.name == "engine":
        arguments.append(f"VARIANT={variant}")
    run(
        # Of the builder's network and of no runtime beside it: what it needs is there everywhere.
        *("buildah", "build", "--isolation", "chroot", "--network", "host"),
        *(f"--build-arg={argument}" for argument in arguments),
        *(("--secret", f"id=ca,src={ca}") if ca else ()),
        *("--file", f"Dockerfile.{image.name}", "--tag", tag, "."),
        cwd=ROOT,
    )


def revision() -> str:
    """The commit, with a mark when the tree has been changed since."""
    return run("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", cwd=ROOT)


def examine(image: Image, tag: str, output: Path) -> list[str]:
    """What holds, a line each. Raises Failed for what does not."""
    config = json.loads(run("buildah", "inspect", "--type", "image", tag))["OCIv1"]["config"]
    user = config["User"]
    if user.split(":")[0] in ("", "0", "root"):
        raise Failed(f"{tag} runs as {user or 'root'}")
    archive = output / f"{image.name}.tar"
    run("buildah", "push", "--quiet", tag, f"docker-archive:{archive}:{tag}")
    megabytes = archive.stat().st_size / MB
    if image.largest is not None and megabytes > image.largest:
        raise Failed(f"{tag} has {megabytes:.0f} MB, more than {image.largest}")
    container = run("buildah", "from", tag)
    try:
        inside = ("buildah", "run", "--isolation", "chroot", "--network", "host", container, "--")
        usage = run(*inside, *config["Entrypoint"], "--help").splitlines()[0]
        health = run(*inside, "python", "-c", image.health)
        sbom = run(*inside, "cat", f"/{SBOM}")
    finally:
        run("buildah", "rm", container)
    (output / f"{image.name}.cdx.json").write_text(sbom)
    parts = json.loads(sbom)["components"]
    if not parts:
        raise Failed(f"{tag}: /{SBOM} lists nothing")
    return [
        f"{tag}: {megabytes:.0f} MB uncompressed, user {user}",
        f"--help: {usage}",
        f"health: {health}",
        f"SBOM: {len(parts)} Python packages in {output / f'{image.name}.cdx.json'}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="*", choices=[*IMAGES, []], help="default: operator")
    parser.add_argument("--variant", choices=["cuda", "cpu"], default="cuda", help="of the engine")
    parser.add_argument(
        "--base", help="an image, or `debian` to make one; default: the Dockerfile's"
    )
    parser.add_argument(
        "--ca",
        default=os.environ.get("SSL_CERT_FILE"),
        help="bundle to trust while packages are fetched (default: SSL_CERT_FILE)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        base = make_debian_base() if options.base == "debian" else options.base
        for name in options.images or ["operator"]:
            image, tag = IMAGES[name], f"localhost/plimsoll/{name}:{VERSION}"
            build(image, tag, base, options.variant, options.ca)
            print("\n".join(examine(image, tag, options.output)), flush=True)
    except FileNotFoundError as missing:
        needed = "apt-get install git buildah mmdebstrap"
        print(f"{missing.filename} is missing; what is needed: {needed}", file=sys.stderr)
        return 1
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
