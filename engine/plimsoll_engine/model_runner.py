"""Runs one model (or one rank's shard of it) on one device: the executor of a single device.

In: the configuration, then batches of plain integers. Out: sampled tokens and memory figures. Load,
profile and resize raise EngineFailure or AllocationFailure; a step that the device has no memory
for raises AllocationFailure and can be repeated. Who may run, and in what order, is not known here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from plimsoll_engine.attention import build_attention, choose_cache_dtype
from plimsoll_engine.config import DType, EngineConfig
from plimsoll_engine.device import Device, DeviceUse, allocation_failure, open_device
from plimsoll_engine.executor import (
    AllocationFailure,
    DeviceMemory,
    MemoryFigures,
    ModelLimits,
    SampledToken,
    StepBatch,
)
from plimsoll_engine.grammar import GrammarCompiler, GrammarMatchers
from plimsoll_engine.kv_cache import KVCache, build_kv_cache, plan_layout
from plimsoll_engine.memory import check_length
from plimsoll_engine.memory_estimate import busy_at_load, check_weights_fit, held_elsewhere
from plimsoll_engine.models.backends import (
    Backend,
    ServedModel,
    check_parallel_size,
    load_backend,
    load_served_model,
)
from plimsoll_engine.models.config import DTYPES, LayerAttention
from plimsoll_engine.models.source import load_failure, resolve_model
from plimsoll_engine.models.tokenizer import load_tokenizer
from plimsoll_engine.parallel.group import Group, LoneRank
from plimsoll_engine.profile_step import build_profile_step
from plimsoll_engine.sampling import Sampler, rows_at_once
from plimsoll_engine.step_graphs import LARGEST_BY_DEFAULT, StepGraphs, default_sizes
from plimsoll_engine.step_inputs import StepInputs, WantedRow, build_step_inputs, wanted_rows
from plimsoll_engine.step_results import StepResults
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase
from plimsoll_engine.transfers import indices

# Float32 logits held at once; more rows are computed in passes. On CUDA each pass reads the output
# embedding again, which costs more than the memory does.
LOGITS_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
# A pass has no more rows than a step may sample, but for so many: log-probabilities of a prompt
# should neither take more memory than the widest batch nor go token by token.
MIN_PASS_ROWS = 32
# Layers that see as far as each other allocate and free the same, so two show the peak of them.
MIN_PROFILED_LAYERS = 2
# How much more than in proportion a larger step may take before it is tried.
_SAFETY = 1.25


class ModelRunner:
    """Implements ``executor.Executor``. Driven by one thread."""

    def __init__(self, config: EngineConfig, device_kind: str, group: Group | None = None) -> None:
        self._config = config
        self._kind = device_kind
        self._group = group or LoneRank()
        self._sampler = Sampler(config.seed)
        compiler = GrammarCompiler(lambda: load_tokenizer(config))
        self._matchers = GrammarMatchers(compiler, 2 * config.max_num_seqs)
        self._device: Device = open_device(device_kind, config, self._group.local_rank)
        self._model: ServedModel | None = None
        self._decoder: Backend | None = None
        self._cache: KVCache | None = None
        self._graphs: StepGraphs | None = None
        self._elsewhere = 0

    @property
    def model(self) -> ServedModel:
        assert self._model is not None, "load() comes first"
        return self._model

    @property
    def decoder(self) -> Backend:
        assert self._decoder is not None, "load() comes first"
        return self._decoder

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "load() comes first"
        return self._cache

    @torch.inference_mode()
    def load(self) -> ModelLimits:
        config, size = self._config, self._group.size
        source = resolve_model(config.model, config.revision)
        model = load_served_model(source)
        check_parallel_size(model, size)
        check_length(model.max_model_len, config.max_model_len)
        dtype = self._dtype(model)
        cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype)
        use = self._device.use()
        self._elsewhere = held_elsewhere(self._kind, use.used)
        check_weights_fit(
            config,
            model,
            dtype,
            self._kind,
            size,
            local_size=self._group.local_size,
            total=use.total,
            used=use.used,
        )
        try:
            decoder = load_backend(
                source,
                model,
                self._group,
                dtype,
                self._device.torch_device,
                config.load_format,
            )
            layout = plan_layout(
                num_layers=model.num_layers,
                num_kv_heads=decoder.num_kv_heads,
                head_size=model.head_size,
                block_size=config.block_size,
                dtype=cache_dtype,
                device_kind=self._kind,
                device_bytes=use.total,
            )
            self._cache = build_kv_cache(layout, use.total, self._device.torch_device)
        except (RuntimeError, MemoryError) as error:
            if allocation_failure(error) is None:
                raise load_failure(f"the model cannot be loaded: {error}") from error
            if self._elsewhere:
                raise busy_at_load(self._elsewhere, use.total, str(error)) from error
            raise EngineFailure(
                FailureClass.MODEL_TOO_LARGE,
                Phase.LOAD,
                f"the device ran out of memory while the weights were loaded: {error}",
                {"device_total_bytes": use.total, "device_used_bytes": use.used},
            ) from error
        self._model, self._decoder = model, decoder
        self._device.reclaim()
        return ModelLimits(
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            num_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            dtype=str(dtype).removeprefix("torch."),
        )

    def _dtype(self, model: ServedModel) -> torch.dtype:
        if self._config.dtype is not DType.AUTO:
            return DTYPES[self._config.dtype.value]
        return torch.float32 if self._kind == "cpu" else DTYPES[model.stored_dtype]

    @torch.inference_mode()
    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        """Runs the worst admissible step, records the decode steps, and reports what both took.

        The step is approached from a sixteenth of its size: each run foretells the next, so that a
        step which does not fit is told of (EngineFailure CudaOOMAtStart) and not tried.
        """
        layout = self.cache.layout
        # One segment takes the writes of all sequences: the peak does not depend on what is there.
        self.resize_kv(1)
        self._profile_run(min(16, max_num_batched_tokens), 1, min(16, max_model_len))
        self._device.reclaim()
        rest = self._device.use(reset_peak=True).used
        total = self._device.use().total
        # Ranks decide alike, or they would wait for each other in different steps.
        all_rest = self._over_ranks(rest)
        activations, ran = 0, 0
        for part in (16, 4, 2, 1):
            tokens = max(1, max_num_batched_tokens // part)
            per_token = self._over_ranks(activations) / ran if ran else 0.0
            foretold = int(per_token * tokens)
            # The steps between are needed only where the whole is not safe to try yet.
            whole = int(per_token * max_num_batched_tokens)
            if ran and part > 1 and all_rest + 2 * _SAFETY * whole <= total:
                continue
            if all_rest + _SAFETY * foretold > total:
                raise self._step_does_not_fit(tokens, foretold, all_rest, total)
            try:
                self._profile_run(
                    tokens,
                    max(1, min(max_num_seqs // part, tokens)),
                    max(1, max_model_len // part),
                )
            except AllocationFailure as error:
                raise self._step_does_not_fit(tokens, foretold, all_rest, total) from error
            activations, ran = max(activations, self._device.use().peak - rest), tokens
        self.resize_kv(0)
        self._device.reclaim()
        graphs = self._record_graphs(max_num_seqs, max_model_len)
        weights = self.decoder.num_bytes()
        return MemoryFigures(
            total=self._device.use(reset_peak=True).total,
            weights=weights,
            activations=activations,
            # What others hold is no part of the plan: they may leave.
            runtime=max(0, rest - self._elsewhere - weights - layout.segment_bytes),
            bytes_per_block=layout.bytes_per_block,
            graphs=graphs,
        )

    def _step_does_not_fit(self, tokens: int, needed: int, rest: int, total: int) -> EngineFailure:
        elsewhere = self._over_ranks(self._elsewhere)
        if elsewhere and rest - elsewhere + _SAFETY * needed <= total:
            return busy_at_load(elsewhere, total, f"a step of {tokens} tokens needs {needed} bytes")
        return _step_does_not_fit(tokens, needed, rest, total)

    def _record_graphs(self, max_num_seqs: int, max_model_len: int) -> int:
        """Before there is a pool, so that it is sized by what they really take. Returns the bytes."""
        recorder = self._device.recorder()
        config = self._config
        if recorder is None or config.enforce_eager or not self.decoder.recordable:
            return 0
        largest = config.max_cudagraph_capture_size or min(max_num_seqs, LARGEST_BY_DEFAULT)
        sizes = config.cudagraph_capture_sizes or default_sizes(largest)
        use = self._device.use(reset_peak=True)
        graphs = StepGraphs(
            sizes,
            math.ceil(max_model_len / config.block_size),
            config.block_size,
            self._device.torch_device,
        )
        try:
            graphs.capture(recorder, self._forward)
        except (RuntimeError, MemoryError) as error:
            if allocation_failure(error) is None:
                raise
            raise _graphs_do_not_fit(sizes, use, self._device.use().used) from error
        self._graphs = graphs
        self._device.reclaim()
        return max(0, self._device.use().used - use.used)

    def _forward(self, inputs: StepInputs, num_layers: int | None = None) -> torch.Tensor:
        attention = build_attention(
            self.cache, inputs.attention, inputs.slots, self.model.attention
        )
        return self.decoder.forward(inputs.token_ids, inputs.positions, attention, num_layers)

    def _over_ranks(self, value: int) -> int:
        """On the CPU the ranks of a pod share one memory; on CUDA the worst counts."""
        if self._kind != "cpu":
            return self._group.max(value)
        return self._group.sum(value) * self._group.local_size // self._group.size

    def _profile_run(self, tokens: int, sequences: int, length: int) -> None:
        batch = build_profile_step(
            num_tokens=tokens,
            num_sequences=sequences,
            max_model_len=length,
            block_size=self._config.block_size,
            num_blocks=self.cache.num_blocks,
            vocab_size=self.model.vocab_size,
            num_prompt_rows=self._pass_rows,
            num_drawn=rows_at_once(self.model.vocab_size, self._kind),
        )
        self._run(batch, profiled_layers(self.model.attention))

    @torch.inference_mode()
    def resize_kv(self, num_blocks: int) -> int:
        layout = self.cache.layout
        growth = (num_blocks - self.cache.num_blocks) * layout.bytes_per_block
        use = self._device.use()
        # The CPU's allocator would give what the container does not have.
        if growth > 0 and self._kind == "cpu" and use.used + growth > use.total:
            raise AllocationFailure(
                f"{growth} more bytes of KV cache exceed the limit of {use.total} bytes, "
                f"{use.used} of which are used",
                growth,
            )
        try:
            return self.cache.resize(num_blocks)
        except (RuntimeError, MemoryError) as error:
            failure = allocation_failure(error)
            if failure is None:
                raise
            raise AllocationFailure(str(failure), growth) from error

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> list[SampledToken]:
        return self._run(batch, None)

    def _run(self, batch: StepBatch, num_layers: int | None) -> list[SampledToken]:
        try:
            with self._device.measuring():
                return self._step(batch, num_layers)
        except (RuntimeError, MemoryError) as error:
            failure = allocation_failure(error)
            if failure is None:
                raise
            # The traceback's frames hold the step's tensors: do not keep them.
            raise failure from None

    def _step(self, batch: StepBatch, num_layers: int | None) -> list[SampledToken]:
        if self._graphs is not None and self._graphs.takes(batch):
            batch, hidden = self._graphs.run(batch)
        else:
            device = self._device.torch_device
            inputs = build_step_inputs(batch, self._config.block_size, device)
            hidden = self._forward(inputs, num_layers)
        results = StepResults(self._sampler, self._matchers)
        for rows in self._passes(wanted_rows(batch)):
            index = indices([wanted.row for wanted in rows], hidden.device)
            logits = self.decoder.logits(hidden[index])
            # On other ranks than the first: sampling is the first one's.
            if logits is not None:
                results.add(rows, logits)
        return results.read(batch, hidden.device)

    def _passes(self, rows: Iterator[WantedRow]) -> Iterator[Sequence[WantedRow]]:
        while some := tuple(itertools.islice(rows, self._pass_rows)):
            yield some

    @property
    def _pass_rows(self) -> int:
        """Rows whose logits are computed at once."""
        fitting = max(1, LOGITS_BYTES[self._kind] // (4 * self.model.vocab_size))
        return min(fitting, max(MIN_PASS_ROWS, self._config.max_num_seqs))

    def reclaim(self) -> None:
        self._device.reclaim()

    def device_use(self, *, reset_peak: bool = False) -> DeviceUse:
        return self._device.use(reset_peak=reset_peak)

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        use = self._device.use(reset_peak=reset_low_water)
        return DeviceMemory(
            total=use.total,
            free=max(0, use.total - use.used),
            free_low_water=max(0, use.total - use.peak),
        )

    def shutdown(self) -> None:
        self._graphs = None
        self._decoder = None
        self._cache = None
        self._device.reclaim()


def profiled_layers(layers: Sequence[LayerAttention]) -> int:
    """How many of the first layers to run so that one that sees the farthest is among them."""
    reach = [math.inf if own.sliding_window is None else own.sliding_window for own in layers]
    return max(MIN_PROFILED_LAYERS, reach.index(max(reach)) + 1)


def _step_does_not_fit(tokens: int, needed: int, rest: int, total: int) -> EngineFailure:
    return EngineFailure(
        FailureClass.DEVICE_OOM_AT_START,
        Phase.PROFILE,
        f"a step of {tokens} tokens needs about {needed} bytes beside the {rest} in use, and the "
        f"device has {total}: lower --max-num-batched-tokens or --max-model-len",
        {"step_tokens": tokens, "step_bytes": needed, "rest_bytes": rest, "total_bytes": total},
        {"flag": "--max-num-batched-tokens", "value": max(1, tokens // 2)},
    )


def _graphs_do_not_fit(sizes: Sequence[int], before: DeviceUse, used: int) -> EngineFailure:
    taken = max(0, used - before.used)
    return EngineFailure(
        FailureClass.DEVICE_OOM_AT_START,
        Phase.PROFILE,
        f"out of memory while {len(sizes)} decode steps of up to {max(sizes)} requests were recorded "
        f"as CUDA graphs: {taken} bytes taken beside the {before.used} in use, and the device has "
        f"{before.total}. Lower --max-cudagraph-capture-size, or give --enforce-eager",
        {
            "graph_sizes": len(sizes),
            "largest_graph": max(sizes),
            "graphs_bytes": taken,
            "rest_bytes": before.used,
            "total_bytes": before.total,
        },
        {"flag": "--max-cudagraph-capture-size", "value": max(1, max(sizes) // 4)},
    )
