"""Reads manifests and model configurations from where the command line says.

In: paths, ``-``, a hub name. Out: LLMDeployments as the API server would return them, or the parsed
config.json. A UsageError names the file and the field. Only a hub name reaches the network.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from plimsoll_operator import names
from plimsoll_operator.cli.definitions import find_mistakes, own_definitions, schema_of
from plimsoll_operator.cli.errors import CommandError, UsageError
from plimsoll_operator.spec import Deployment, ModelSource

Json = dict[str, Any]

_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def read_deployments(file: str, namespace: str | None) -> list[Json]:
    """Every LLMDeployment of a YAML file, checked against this version's definition."""
    text = _read_text(file)
    try:
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    found = [each for each in documents if _is_deployment(each)]
    if not found:
        kinds = sorted({str(each.get("kind")) for each in documents if isinstance(each, dict)})
        raise UsageError(f"{file} has no LLMDeployment; it has {', '.join(kinds) or 'nothing'}")
    schema = schema_of(own_definitions()[f"{names.PLURAL}.{names.GROUP}"], names.VERSION)
    assert schema is not None
    for each in found:
        if mistakes := find_mistakes(each, schema):
            raise UsageError("\n".join(f"{file}: {mistake}" for mistake in mistakes))
    return [_completed(each, file, namespace) for each in found]


def _is_deployment(document: object) -> bool:
    return (
        isinstance(document, dict)
        and document.get("kind") == names.KIND
        and document.get("apiVersion") == names.API_VERSION
    )


def _completed(resource: Json, file: str, namespace: str | None) -> Json:
    """With the metadata that the server would add, where a builder needs it."""
    metadata = resource.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise UsageError(f"{file}: metadata.name is missing; allowed: the LLMDeployment's name")
    known = {"namespace": namespace or "default", "uid": "", "generation": 1, **metadata}
    return {**resource, "metadata": known}


def _read_text(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).expanduser().read_text()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise UsageError(f"{file} cannot be read: {_reason(error)}") from error


def local_model(deployment: Deployment) -> str | None:
    """The folder of a file:// model, where this machine has it too."""
    if deployment.model.source is not ModelSource.FILE:
        return None
    folder = Path("/", deployment.model.location.lstrip("/"))
    return str(folder) if (folder / "config.json").is_file() else None


def read_model_config(where: str, revision: str | None, option: str = "--model-config") -> object:
    """``where`` is a config.json, a folder with one, or a name of the Hugging Face hub, as ``option``
    gave it."""
    path = Path(where).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if not _HUB_NAME.fullmatch(where) or where.endswith(".json"):
            raise UsageError(
                f"{option} {where}: no such file; allowed: a config.json, a folder with one, "
                "or a hub name org/name"
            )
        path = _download(where, revision, option)
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {_reason(error)}") from error


def _download(name: str, revision: str | None, option: str) -> Path:
    """config.json alone, by the hub's own client: its cache, HF_TOKEN and HF_ENDPOINT hold."""
    # Only here: no other command needs it, and it takes its time.
    import httpx2
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    refusals = (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (httpx2.HTTPError, OSError, ValueError) as error:
        cause = error if isinstance(error, refusals) else error.__cause__
        if isinstance(cause, refusals):
            raise UsageError(f"{option} {name}{at}: {_reason(error)}") from error
        raise CommandError(
            f"{option} {name}{at}: the hub cannot be reached: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
