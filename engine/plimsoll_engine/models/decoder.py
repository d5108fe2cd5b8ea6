"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 shapes, driven by its configuration.

In: token ids and positions of a step, flattened over its sequences, and an attention function that
keeps keys and values. Out: hidden states, and float32 logits of chosen rows. A rank holds its shard
of the weights; the group joins what the ranks compute. The decoder knows neither sequences nor
blocks, and not where its weights come from: ``destinations`` says where each belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from plimsoll_engine.layer_ops import LayerOps, choose_layer_ops
from plimsoll_engine.models.config import ModelConfig
from plimsoll_engine.models.linear import Weight
from plimsoll_engine.parallel.group import Group
from plimsoll_engine.parallel.shard import Shard


class Attention(Protocol):
    """Stores the keys and values of a step's tokens, then attends for its queries."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [tokens, heads, head_size]; key and value [tokens, kv_heads, head_size]; the result
        has the query's shape."""


@dataclass(frozen=True)
class Destination:
    """Where a stored weight goes: its ``rows`` and ``columns`` (half-open) fill ``target``."""

    target: torch.Tensor
    rows: range
    # None for a vector.
    columns: range | None = None


@dataclass(frozen=True)
class Linear:
    """``weight`` [out, in]; ``bias`` [out] or None."""

    weight: Weight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.multiply(x, self.bias)


@dataclass(frozen=True)
class RowParallelLinear:
    """The input's columns are divided among ranks: partial products are summed, then biased."""

    weight: Weight
    bias: torch.Tensor | None
    group: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = self.group.all_reduce(self.weight.multiply(x))
        return result if self.bias is None else result + self.bias


@dataclass(frozen=True)
class RMSNorm:
    weight: torch.Tensor
    epsilon: float
    ops: LayerOps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.epsilon)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the norm of x + residual, x + residual)"""
        return self.ops.add_rms_norm(x, residual, self.weight, self.epsilon)


@dataclass(frozen=True)
class Layer:
    input_norm: RMSNorm
    # Rows: this rank's query heads, then key heads, then value heads.
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: RowParallelLinear
    post_norm: RMSNorm
    # Rows: this rank's part of the gate, then of the up projection.
    gate_up: Linear
    down: RowParallelLinear


class Decoder:
    recordable = True

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        """Allocates the shard's weights without setting them (device "meta": sizes only).

        ``ops``: those that fit device and type, when None.
        """
        self.config = config
        self.shard = shard
        self.group = group
        self._ops = ops or choose_layer_ops(device, dtype)
        self.num_heads = len(shard.query_heads)
        self.num_kv_heads = len(shard.kv_heads)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def matrix(rows: int, columns: int) -> Weight:
            return Weight(empty(rows, columns))

        def norm(size: int) -> RMSNorm:
            return RMSNorm(empty(size), config.rms_norm_eps, self._ops)

        hidden, head_size = config.hidden_size, config.head_size
        qkv_rows = (self.num_heads + 2 * self.num_kv_heads) * head_size
        inner = len(shard.intermediate)
        self.layers = [
            Layer(
                input_norm=norm(hidden),
                qkv=Linear(matrix(qkv_rows, hidden), empty(qkv_rows) if config.qkv_bias else None),
                query_norm=norm(head_size) if config.qk_norm else None,
                key_norm=norm(head_size) if config.qk_norm else None,
                output=RowParallelLinear(
                    matrix(hidden, self.num_heads * head_size),
                    empty(hidden) if config.output_bias else None,
                    group,
                ),
                post_norm=norm(hidden),
                gate_up=Linear(
                    matrix(2 * inner, hidden), empty(2 * inner) if config.mlp_bias else None
                ),
                down=RowParallelLinear(
                    matrix(hidden, inner), empty(hidden) if config.mlp_bias else None, group
                ),
            )
            for _ in range(config.num_layers)
        ]
        self.norm = norm(hidden)
        self.embedding = empty(len(shard.vocabulary), hidden)
        self.head = (
            Weight(self.embedding)
            if config.tied_embeddings
            else matrix(len(shard.vocabulary), hidden)
        )
        self._inverse_frequencies = torch.tensor(
            config.inverse_frequencies, dtype=torch.float32, device=device
        )
        self._stored_bytes = sum(place.target.nbytes for place in self.destinations().values())

    def destinations(self) -> dict[str, Destination]:
        """Name in a Hugging Face checkpoint -> where it goes, for every weight of this shard; before ``pack``."""
        hidden = range(self.config.hidden_size)
        result = {
            "model.embed_tokens.weight": Destination(self.embedding, self.shard.vocabulary, hidden),
            "model.norm.weight": Destination(self.norm.weight, hidden),
        }
        if not self.config.tied_embeddings:
            result["lm_head.weight"] = Destination(self.head.dense, self.shard.vocabulary, hidden)
        for index, layer in enumerate(self.layers):
            for name, destination in self._layer_destinations(layer):
                result[f"model.layers.{index}.{name}"] = destination
        return result

    def _layer_destinations(self, layer: Layer) -> Iterator[tuple[str, Destination]]:
        size = self.config.head_size
        hidden = range(self.config.hidden_size)

        def rows_of(heads: range) -> range:
            return range(heads.start * size, heads.stop * size)

        queries, keys = rows_of(self.shard.query_heads), rows_of(self.shard.kv_heads)
        inner = self.shard.intermediate
        yield "input_layernorm.weight", Destination(layer.input_norm.weight, hidden)
        yield "post_attention_layernorm.weight", Destination(layer.post_norm.weight, hidden)
        for norm, name in ((layer.query_norm, "q_norm"), (layer.key_norm, "k_norm")):
            if norm is not None:
                yield f"self_attn.{name}.weight", Destination(norm.weight, range(size))
        stacked = (
            (layer.qkv, (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)), "self_attn"),
            (layer.gate_up, (("gate_proj", inner), ("up_proj", inner)), "mlp"),
        )
        for linear, parts, block in stacked:
            start = 0
            for name, rows in parts:
                stop = start + len(rows)
                yield (
                    f"{block}.{name}.weight",
                    Destination(linear.weight.dense[start:stop], rows, hidden),
                )
                if linear.bias is not None:
                    yield f"{block}.{name}.bias", Destination(linear.bias[start:stop], rows)
                start = stop
        yield "self_attn.o_proj.weight", Destination(layer.output.weight.dense, hidden, queries)
        yield "mlp.down_proj.weight", Destination(layer.down.weight.dense, hidden, inner)
        if layer.output.bias is not None:
            yield "self_attn.o_proj.bias", Destination(layer.output.bias, hidden)
        if layer.down.bias is not None:
            yield "mlp.down_proj.bias", Destination(layer.down.bias, hidden)

    def pack(self) -> None:
        """Brings the weights, once they are read, into the order that the device reads best.

        One at a time: no more than the largest is there twice. A head that is the embedding too
        becomes a copy of it: rows of a packed weight cannot be looked up.
        """
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.weight.pack()
        self.head.pack()

    def num_bytes(self) -> int:
        copied = self.config.tied_embeddings and self.head.is_packed
        return self._stored_bytes + (self.embedding.nbytes if copied else 0)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """token_ids and positions [tokens], int64 -> normed hidden states [tokens, hidden_size].

        ``num_layers`` runs only the first layers: enough to measure what any layer needs.
        """
        hidden = self._embed(token_ids)
        cos, sin = self._cos_sin(positions, hidden.dtype)
        layers = self.layers[:num_layers]
        following = [*(layer.input_norm for layer in layers[1:]), self.norm]
        normed = layers[0].input_norm(hidden)
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            attended = self._attend(index, layer, normed, cos, sin, attention)
            normed, hidden = layer.post_norm.add(attended, hidden)
            del attended
            normed, hidden = next_norm.add(self._feed_forward(layer, normed), hidden)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden_size] -> float32 [rows, vocab_size]; None on ranks other than 0."""
        logits = self.head.multiply(hidden)
        if self.shard.vocabulary_divided:
            gathered = self.group.gather_columns(logits)
            return None if gathered is None else gathered.float()
        return logits.float() if self.shard.rank == 0 else None

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if not self.shard.vocabulary_divided:
            return F.embedding(token_ids, self.embedding)
        local = token_ids - self.shard.vocabulary.start
        outside = (local < 0) | (local >= len(self.shard.vocabulary))
        rows = F.embedding(local.masked_fill(outside, 0), self.embedding)
        return self.group.all_reduce(rows.masked_fill(outside[:, None], 0))

    def _cos_sin(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, 1, head_size / 2] each."""
        angles = positions[:, None, None].float() * self._inverse_frequencies
        factor = self.config.rope_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _attend(
        self,
        index: int,
        layer: Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        heads, kv_heads, size = self.num_heads, self.num_kv_heads, self.config.head_size
        query, key, value = (
            layer.qkv(hidden)
            .view(-1, heads + 2 * kv_heads, size)
            .split((heads, kv_heads, kv_heads), dim=1)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        query, key = self._ops.rotary(query, key, cos, sin)
        result = attention(index, query, key, value)
        return layer.output(result.reshape(-1, heads * size))

    def _feed_forward(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        return layer.down(self._ops.silu_and_mul(layer.gate_up(hidden)))
