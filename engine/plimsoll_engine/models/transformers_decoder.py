"""A model of transformers whose attention is the engine's own, over a flat batch.

In: a model that was built with ``transformers_attention``, and the attention over a KV cache. Out:
hidden states and logits, as ``models.decoder`` gives them. All sequences of a step are one row of
tokens to the model: nothing but attention may look from one token to another, which
``transformers_trial`` has made sure of.
"""

from __future__ import annotations

from typing import Any

import torch

from plimsoll_engine.models.decoder import Attention
from plimsoll_engine.models.transformers_attention import AttentionCall, attending


class _BodyOutput:
    """What a model's body gives its head: hidden states, and None for all else that heads hand on."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenHiddenStates(torch.nn.Module):
    """Stands where a model's body was, so that what remains is its head: the output embedding with
    all that a family does around it (caps, scales, norms)."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> _GivenHiddenStates:
        # OPT's head asks the body's inner part.
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> _BodyOutput:
        return _BodyOutput(self.hidden)


class SplitModel:
    """A causal LM of transformers as two steps: hidden states, and logits of some of them."""

    def __init__(self, model: Any) -> None:
        """``model`` is this object's own from now on."""
        self._weights = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._body = model.base_model
        self._head = model.eval()
        self._given = _GivenHiddenStates()
        setattr(model, model.base_model_prefix, self._given)

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values())

    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self._weights.values())

    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As ``TransformersDecoder.forward``, by whatever attention is in force."""
        output = self._body(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> float32 [rows, vocab_size]"""
        self._given.hidden = hidden[None]
        try:
            # The ids are not looked at, but transformers wants some.
            ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._head(input_ids=ids, use_cache=False).logits
        finally:
            del self._given.hidden
        return logits[0].float()


class TransformersDecoder(SplitModel):
    # Some families look at positions on the host.
    recordable = False

    def __init__(self, model: Any, num_kv_heads: int) -> None:
        super().__init__(model)
        self.num_kv_heads = num_kv_heads

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """token_ids, positions int64 [tokens] -> hidden states [tokens, hidden_size].

        ``num_layers`` is not heeded: these models run whole.
        """

        def attend(call: AttentionCall) -> torch.Tensor:
            query, key, value = (
                part[0].transpose(0, 1).contiguous() for part in (call.query, call.key, call.value)
            )
            return attention(call.module.layer_idx, query, key, value)[None]

        with attending(attend):
            return self.hidden_states(token_ids, positions)
