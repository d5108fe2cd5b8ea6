"""Which of two implementations runs a model, and what the engine asks of either.

The decoder of this package computes the families of ``config.ARCHITECTURES``, with tensor parallel
ranks, kernels for the small operations and weights from safetensors or GGUF. Every other causal LM
of transformers that keeps no state beside keys and values runs in transformers' own code, whole,
on one device, with the engine's attention in it.

In: a :class:`ModelSource`. Out: a description, then a loaded model; or an EngineFailure that says
what is supported.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from plimsoll_engine.config import LoadFormat
from plimsoll_engine.models.config import (
    ARCHITECTURES,
    ModelConfig,
    TransformersConfig,
    convert_config,
    load_hf_config,
)
from plimsoll_engine.models.decoder import Attention, Decoder
from plimsoll_engine.models.linear import packs
from plimsoll_engine.models.source import ModelSource, load_failure
from plimsoll_engine.models.weights import draw_weights, load_weights, open_weights
from plimsoll_engine.parallel.group import Group, LoneRank
from plimsoll_engine.parallel.shard import allowed_sizes, check_size
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

ServedModel = ModelConfig | TransformersConfig


class Backend(Protocol):
    """A loaded model, or one rank's part of it."""

    # Those that this rank keeps keys and values of.
    num_kv_heads: int
    # Whether ``forward`` does nothing but launch kernels on tensors: no look at a value, no choice by
    # one, so that it can be recorded.
    recordable: bool

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        num_layers: int | None = None,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None: ...

    def num_bytes(self) -> int: ...


def load_served_model(source: ModelSource) -> ServedModel:
    """Raises EngineFailure ModelLoadFailed for a file that cannot be read or a model that neither
    can run."""
    hf_config = load_hf_config(source)
    if hf_config.model_type in ARCHITECTURES:
        return convert_config(hf_config)
    if source.gguf_file is not None:
        raise load_failure(
            f"the model's type {hf_config.model_type} is not supported as a GGUF file; supported: "
            f"{', '.join(ARCHITECTURES)}, or a folder of safetensors"
        )
    # Imported here, as below: the start of other models would wait for transformers' models.
    from plimsoll_engine.models.transformers_trial import try_model

    return try_model(hf_config)


def load_backend(
    source: ModelSource,
    model: ServedModel,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
) -> Backend:
    """Reads the weights, or draws them. Raises EngineFailure, or what torch raises where there is no memory."""
    if isinstance(model, TransformersConfig):
        if load_format is LoadFormat.DUMMY:
            raise EngineFailure(
                FailureClass.INVALID_CONFIGURATION,
                Phase.CONFIGURATION,
                f"--load-format dummy: {model.architecture} runs in transformers' own code, whose "
                f"weights are read; allowed: auto. Types that can: {', '.join(ARCHITECTURES)}",
                suggestion={"flag": "--load-format", "value": "auto"},
            )
        return _load_by_transformers(source, model, dtype, device)
    decoder = Decoder(model, model.shard(group.rank, group.size), group, dtype, device)
    if load_format is LoadFormat.DUMMY:
        draw_weights(decoder.destinations())
    else:
        load_weights(open_weights(source, model), decoder.destinations())
    decoder.pack()
    return decoder


def _load_by_transformers(
    source: ModelSource, model: TransformersConfig, dtype: torch.dtype, device: torch.device
) -> Backend:
    from transformers import AutoModelForCausalLM

    from plimsoll_engine.models.transformers_attention import IMPLEMENTATION
    from plimsoll_engine.models.transformers_decoder import TransformersDecoder

    factory: Any = AutoModelForCausalLM
    try:
        loaded, told = factory.from_pretrained(
            source.folder,
            config=model.hf_config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    # RuntimeError and MemoryError are looked through by the caller: memory may have run out.
    except (RuntimeError, MemoryError):
        raise
    # transformers raises whatever its readers raise.
    except Exception as error:
        raise load_failure(
            f"the weights in {source.folder} cannot be read: {str(error)[:300]}"
        ) from error
    # transformers would draw them at random.
    missing = sorted(told["missing_keys"])
    if missing:
        raise load_failure(
            f"the checkpoint lacks {len(missing)} weights, the first being {missing[0]}"
        )
    return TransformersDecoder(loaded.to(device), model.num_kv_heads)


def allowed_parallel_sizes(model: ServedModel) -> tuple[int, ...]:
    if isinstance(model, TransformersConfig):
        return (1,)
    return allowed_sizes(model.num_heads, model.num_kv_heads)


def check_parallel_size(model: ServedModel, size: int) -> None:
    """Raises EngineFailure InvalidConfiguration when the model cannot be divided so."""
    if isinstance(model, ModelConfig):
        check_size(model.num_heads, model.num_kv_heads, size)
    elif size > 1:
        raise EngineFailure(
            FailureClass.INVALID_CONFIGURATION,
            Phase.CONFIGURATION,
            f"--tensor-parallel-size {size}: {model.architecture} runs in transformers' own code, "
            f"on one device; allowed: 1. Types that can be divided: {', '.join(ARCHITECTURES)}",
            {"size": size},
            {"flag": "--tensor-parallel-size", "value": 1},
        )


def weight_bytes(
    model: ServedModel, dtype: torch.dtype, rank: int, size: int, device_kind: str
) -> int:
    """Of one rank's part, told from sizes alone."""
    if isinstance(model, TransformersConfig):
        return model.num_parameters * dtype.itemsize
    shard = model.shard(rank, size)
    decoder = Decoder(model, shard, LoneRank(), dtype, torch.device("meta"))
    # A packed head is no embedding any more.
    copied = model.tied_embeddings and packs(device_kind, dtype)
    return decoder.num_bytes() + (decoder.embedding.nbytes if copied else 0)
