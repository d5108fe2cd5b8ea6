"""The worst step that the limits admit, as a batch: what start-up measures activations with.

In: the limits. Out: a :class:`StepBatch` with the last chunk of a sequence at full length, the rest
of the batch filled with decoding sequences, every sequence sampled with all that sampling can ask
for. The block tables repeat the few blocks there are: values do not matter here, sizes do.
"""

from __future__ import annotations

import math
from dataclasses import replace

from plimsoll_engine.executor import SequenceChunk, StepBatch
from plimsoll_engine.sampling_params import SamplingParams

# Long enough for the decode groups to reach the bound of what is gathered at once.
_DECODE_CONTEXT = 256
# Hot, and nearly all of the tokens: no few of them are enough to draw from.
_WORST_SAMPLING = SamplingParams(
    max_tokens=1,
    temperature=100.0,
    top_p=0.999999,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    seed=0,
    logprobs=5,
)


def build_profile_step(
    *,
    num_tokens: int,
    num_sequences: int,
    max_model_len: int,
    block_size: int,
    num_blocks: int,
    vocab_size: int,
    num_prompt_rows: int,
    num_drawn: int,
) -> StepBatch:
    """``num_tokens`` tokens (fewer only when the sequences cannot hold as many).

    ``num_prompt_rows``: as many log-probabilities of prompt tokens as are computed at once.
    ``num_drawn``: tokens are drawn from so many rows at once; more would only take longer.
    """

    def chunk(index: int, tokens: int, context: int) -> SequenceChunk:
        blocks = math.ceil(context / block_size)
        ids = tuple(position % vocab_size for position in range(context))
        return SequenceChunk(
            request_id=str(index),
            token_ids=ids[:tokens],
            start=context - tokens,
            block_ids=tuple((index + place) % num_blocks for place in range(blocks)),
            sampling=_WORST_SAMPLING
            if index < num_drawn
            else replace(_WORST_SAMPLING, temperature=0.0),
            output_token_ids=ids[:1],
            prompt_token_ids=ids,
            prompt_logprob_rows=(0, min(tokens - 1, num_prompt_rows)),
            num_prompt_logprobs=5,
        )

    chunks = []
    left = num_tokens
    for index in range(num_sequences):
        others = num_sequences - index - 1
        tokens = min(max_model_len, left - others)
        if tokens < 1:
            break
        # Full length for all that compute more than one token, and for the first that decode.
        full = tokens > 1 or index < 2
        context = max_model_len if full else min(max_model_len, _DECODE_CONTEXT)
        chunks.append(chunk(index, tokens, context))
        left -= tokens
    return StepBatch(tuple(chunks))
