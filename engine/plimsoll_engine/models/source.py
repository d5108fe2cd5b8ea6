"""Where a model's files are: ``--model`` resolved to a local folder or a local GGUF file.

In: the flag's text. Out: a :class:`ModelSource`. Names of the Hugging Face hub are resolved by
huggingface_hub, whose environment (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN) holds. This module reads no
weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

# What the engine reads of a repository; not the duplicates in other formats.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_HUB_DUPLICATES = ["consolidated*.safetensors", "original/*"]
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


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
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise load_failure(f"--model {model}: the folder has no config.json")
        return ModelSource(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise load_failure(
                f"--model {model}: a file must be a .gguf file; otherwise give a Hugging Face "
                "folder or a hub name org/name"
            )
        return ModelSource(path.parent, path.name)
    if not _HUB_NAME.fullmatch(model) or path.suffix == ".gguf":
        raise load_failure(f"--model {model}: no such file or folder")
    return _resolve_hub_name(model, revision)


def _resolve_hub_name(name: str, revision: str | None) -> ModelSource:
    at = f" at revision {revision}" if revision else ""
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_DUPLICATES,
            )
        )
    except LocalEntryNotFoundError as error:
        raise load_failure(
            f"--model {name}: no such folder, and the hub's {name}{at} is neither in the local "
            f"cache (HF_HOME) nor can the hub be reached"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise load_failure(f"--model {name}{at}: {str(error).splitlines()[0]}") from error
    if not (folder / "config.json").is_file():
        raise load_failure(f"--model {name}{at}: the repository has no config.json")
    # A snapshot's folder is named after its commit.
    return ModelSource(folder, revision=folder.name)
