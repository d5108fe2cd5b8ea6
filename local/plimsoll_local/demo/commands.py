"""Runs the real helm and kubectl against one cluster, and shows what is run.

In:  the binaries and a kubeconfig. Out: their standard output. A command that fails raises
CommandFailed with what it said.
"""

import asyncio
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class CommandFailed(Exception):
    """A command's exit code was not 0; the message has the command and its standard error."""


@dataclass(frozen=True)
class Commands:
    """helm and kubectl with KUBECONFIG set; `say` gets each command line before it runs."""

    kubectl_path: Path
    helm_path: Path
    kubeconfig: Path
    say: Callable[[str], None]

    async def kubectl(self, *arguments: str, stdin: str | None = None, quiet: bool = False) -> str:
        return await self._run(self.kubectl_path, arguments, stdin, quiet)

    async def helm(self, *arguments: str) -> str:
        return await self._run(self.helm_path, arguments, None, False)

    async def _run(
        self, program: Path, arguments: tuple[str, ...], stdin: str | None, quiet: bool
    ) -> str:
        line = shlex.join([program.name, *arguments])
        if not quiet:
            self.say(f"$ {line}")
        process = await asyncio.create_subprocess_exec(
            str(program),
            *arguments,
            stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        try:
            out, error = await process.communicate(stdin.encode() if stdin is not None else None)
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise CommandFailed(
                f"`{line}` ended with {process.returncode}: {error.decode().strip()}"
            )
        return out.decode()
