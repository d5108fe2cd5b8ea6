"""What to type next, in commands that run as they are printed.

In:  where this program, kubectl and a cluster are. Out: lines for a terminal. Knows nothing of the
demo's steps.
"""

import shlex
import shutil
import sys
from pathlib import Path


def find_program() -> Path:
    """`plimsoll-local` of this environment, which nobody has on PATH; seen from here if below."""
    program = Path(sys.prefix) / "bin" / "plimsoll-local"
    return program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program


def find_kubectl(built: Path) -> Path:
    """By its bare name when that would be found."""
    return Path("kubectl") if shutil.which("kubectl") else built


def describe_down(name: str) -> str:
    return f"{shlex.quote(str(find_program()))} down --name {name}"


def describe_play(name: str, kubeconfig: Path, kubectl: Path, service: str) -> list[str]:
    """How to go on with cluster `name`; `service` is NAMESPACE/DEPLOYMENT:PORT."""
    program, kubectl_line = shlex.quote(str(find_program())), shlex.quote(str(kubectl))
    deployment = service.partition("/")[2].partition(":")[0]
    return [
        f"export KUBECONFIG={shlex.quote(str(kubeconfig))}",
        f"{kubectl_line} get llmd",
        f"{kubectl_line} describe llmd {deployment}",
        f"{program} proxy --name {name} {service}    # an OpenAI API",
        describe_down(name),
    ]
