"""Reads a model's weights, one at a time, from a folder of safetensors or from a GGUF file.

In: a :class:`ModelSource` and a decoder's destinations. Out: filled tensors. Only one stored tensor
is in memory beside the model at any moment, and of safetensors only the rank's part of it. A GGUF
file's quantised tensors are expanded to the model's dtype.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError, safe_open

from plimsoll_engine.models.config import ModelConfig
from plimsoll_engine.models.decoder import Destination
from plimsoll_engine.models.source import ModelSource, load_failure


def draw_weights(destinations: Mapping[str, Destination]) -> None:
    """As wide as initialisers draw them."""
    for place in destinations.values():
        place.target.normal_(0.0, 0.02)


class WeightReader(Protocol):
    def names(self) -> Collection[str]:
        """Names in the manner of a Hugging Face checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor: ...


class SafetensorsReader:
    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in _safetensors_files(folder):
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise load_failure(f"the weights in {path} cannot be read: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                self._files[name] = opened

    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        stored = self._files[name].get_slice(name)
        part: torch.Tensor
        if columns is None:
            part = stored[rows.start : rows.stop]
        else:
            part = stored[rows.start : rows.stop, columns.start : columns.stop]
        return part


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = list(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise load_failure(f"{index} is not a safetensors index: {error!r}") from error
        for file in files:
            if not isinstance(file, str):
                raise load_failure(f"{index}: weight_map names {file!r}, which is no file name")
        names = sorted(set(files))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise load_failure(f"{folder} lacks {missing[0]}, which its index names")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise load_failure(f"{folder} has no *.safetensors files")
    single = folder / "model.safetensors"
    return [single] if single in files else files


# GGUF names of a layer's parts -> names in a checkpoint.
_GGUF_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP_PARTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def _checkpoint_name(gguf_name: str) -> str | None:
    if gguf_name in _GGUF_TOP_PARTS:
        return _GGUF_TOP_PARTS[gguf_name]
    match = _GGUF_LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _GGUF_LAYER_PARTS:
        return None
    return f"model.layers.{match[1]}.{_GGUF_LAYER_PARTS[match[2]]}.{match[3]}"


class GgufWeightReader:
    def __init__(self, path: Path, config: ModelConfig) -> None:
        try:
            reader = GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise load_failure(f"the weights in {path} cannot be read: {error}") from error
        self._config = config
        self._tensors = {}
        for tensor in reader.tensors:
            name = _checkpoint_name(tensor.name)
            if name is None:
                # rope_freqs.weight, for one, changes the positions: not to be left out silently.
                raise load_failure(
                    f"{path} has a tensor {tensor.name}, which this engine does not know; "
                    "a safetensors folder of the same model may work"
                )
            self._tensors[name] = tensor
        # In llama.cpp's "llama" layout the rows of each rotary head are interleaved.
        self._interleaved = _architecture(reader) == "llama"

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        stored = self._tensors[name]
        values: np.ndarray[Any, Any] = dequantize(stored.data, stored.tensor_type)
        if self._interleaved and ".self_attn.q_proj." in name:
            values = _split_halves(values, self._config.num_heads)
        elif self._interleaved and ".self_attn.k_proj." in name:
            values = _split_halves(values, self._config.num_kv_heads)
        part = values[rows.start : rows.stop]
        if columns is not None:
            part = part[:, columns.start : columns.stop]
        # A copy: plain F32 tensors are views of the read-only file.
        return torch.from_numpy(np.array(part))


def _architecture(reader: GGUFReader) -> str:
    field = reader.fields["general.architecture"]
    return bytes(field.parts[field.data[0]]).decode()


def _split_halves(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from pairs (0, h/2), (1, h/2 + 1)... to first half, second half."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def open_weights(source: ModelSource, config: ModelConfig) -> WeightReader:
    if source.gguf_path is not None:
        return GgufWeightReader(source.gguf_path, config)
    return SafetensorsReader(source.folder)


def load_weights(reader: WeightReader, destinations: dict[str, Destination]) -> None:
    """Fills every destination. Raises EngineFailure ModelLoadFailed for a weight that is missing or
    has another size than the configuration says."""
    names = reader.names()
    missing = sorted(destinations.keys() - set(names))
    if missing:
        raise load_failure(
            f"the checkpoint lacks {len(missing)} weights, the first being {missing[0]}"
        )
    for name, place in destinations.items():
        part = reader.read(name, place.rows, place.columns)
        if part.shape != place.target.shape:
            raise load_failure(
                f"weight {name} has shape {reader.shape(name)}; the configuration needs "
                f"{tuple(place.target.shape)} of it"
            )
        place.target.copy_(part)
