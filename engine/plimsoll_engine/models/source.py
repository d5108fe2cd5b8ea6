"""Where a model's files are: ``--model`` resolved to a local folder or a local GGUF file.

In: the flag's text. Out: a :class:`ModelSource`. Names of the Hugging Face hub are resolved by
huggingface_hub, whose environment (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN) holds. A hub that cannot be
reached is tried for about two minutes, a name that the hub refuses only once; the failure's figure
``hub`` says which of the two it was. This module reads no weights.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

# What the engine reads of a repository; not the duplicates in other formats.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_HUB_DUPLICATES = ["consolidated*.safetensors", "original/*"]
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
# Seconds between the tries; a try itself takes 10 s and more where packets vanish.
_HUB_PAUSES = (5.0, 15.0, 40.0)
# Answers of a hub that is there and cannot serve now: too slow, too many requests.
_BUSY_STATUSES = (408, 429)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    folder: Path
    # Name of the GGUF file inside the folder; None for a folder with safetensors.
    gguf_file: str | None = None
    # Commit that a hub name resolved to.
    revision: str | None = None

    @property
    def gguf_path(self) -> Path | None:
        return None if self.gguf_file is None else self.folder / self.gguf_file


def load_failure(message: str, **figures: float | str) -> EngineFailure:
    return EngineFailure(FailureClass.MODEL_LOAD_FAILED, Phase.LOAD, message, figures)


def resolve_model(model: str, revision: str | None = None) -> ModelSource:
    """Finds (downloading a hub name when needed) the files of ``--model``.

    Raises EngineFailure ModelLoadFailed when there is nothing there.
    """
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    # RuntimeError: the home of a user that does not exist. OSError: a name that is too long, a
    # folder above that may not be entered.
    except (OSError, RuntimeError) as error:
        raise load_failure(f"--model {model[:200]}: no such file or folder ({error})") from error
    if is_folder:
        if not (path / "config.json").is_file():
            raise load_failure(f"--model {model}: the folder has no config.json")
        return ModelSource(path)
    if is_file:
        if path.suffix != ".gguf":
            raise load_failure(
                f"--model {model}: a file must be a .gguf file; otherwise give a Hugging Face "
                "folder or a hub name org/name"
            )
        return ModelSource(path.parent, path.name)
    if not _HUB_NAME.fullmatch(model) or path.suffix == ".gguf":
        raise load_failure(f"--model {model}: no such file or folder")
    return _resolve_hub_name(model, revision)


class HubTrouble(StrEnum):
    """Figure ``hub`` of a ModelLoadFailed: may another try help, or is it the setting?"""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    OFFLINE = "offline"


_ADVICE = {
    HubTrouble.UNREACHABLE: "the hub cannot be reached, and the files are not in the local cache "
    "(HF_HOME). Check the network and HF_ENDPOINT, or fill the cache",
    HubTrouble.REFUSED: "does not exist on the hub, or there is no access to it. Check the name "
    "and the revision, and for a gated or private model HF_TOKEN",
    HubTrouble.OFFLINE: "no such folder, and it is not in the local cache (HF_HOME); the hub is "
    "not asked, because HF_HUB_OFFLINE is set",
}


def _resolve_hub_name(name: str, revision: str | None) -> ModelSource:
    at = f" at revision {revision}" if revision else ""
    try:
        folder = _download(name, revision)
    except (httpx2.HTTPError, HFValidationError, OSError) as error:
        trouble = hub_trouble(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if trouble is None:
            raise load_failure(f"--model {name}{at}: {reason}") from error
        raise load_failure(
            f"--model {name}{at}: {_ADVICE[trouble]} ({reason})", hub=trouble.value
        ) from error
    if not (folder / "config.json").is_file():
        raise load_failure(f"--model {name}{at}: the repository has no config.json")
    # A snapshot's folder is named after its commit.
    return ModelSource(folder, revision=folder.name)


def _download(name: str, revision: str | None) -> Path:
    for pause in (*_HUB_PAUSES, None):
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=_HUB_FILES,
                    ignore_patterns=_HUB_DUPLICATES,
                )
            )
        except (httpx2.HTTPError, OSError) as error:
            if pause is None or hub_trouble(error) is not HubTrouble.UNREACHABLE:
                raise
            log.warning("the hub cannot be reached: %s; the next try is in %g s", error, pause)
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def hub_trouble(error: BaseException) -> HubTrouble | None:
    """What an error of huggingface_hub is about; None: not about the hub (a full disk, say)."""
    if isinstance(error, LocalEntryNotFoundError):
        # The cache has nothing either; why the hub gave nothing is the cause.
        return HubTrouble.OFFLINE if error.__cause__ is None else hub_trouble(error.__cause__)
    if isinstance(error, OfflineModeIsEnabled):
        return HubTrouble.OFFLINE
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        is_busy = status >= 500 or status in _BUSY_STATUSES
        return HubTrouble.UNREACHABLE if is_busy else HubTrouble.REFUSED
    if isinstance(error, HFValidationError):
        return HubTrouble.REFUSED
    is_connection = isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError)
    return HubTrouble.UNREACHABLE if is_connection else None


def read_json(source: ModelSource, name: str) -> dict[str, Any]:
    """Empty when there is no such file; a GGUF file's neighbours are not its own."""
    path: Path = source.folder / name
    if source.gguf_file is not None or not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise load_failure(f"{path} cannot be read as JSON: {error}") from error
    return document if isinstance(document, dict) else {}
