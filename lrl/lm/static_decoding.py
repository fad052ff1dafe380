"""Decoding with constant shapes, replayed as a CUDA graph, for GPUs.

A decoding step of a language model starts several hundred kernels, each of which takes less time on a GPU than Python
needs to start it. Here all tensors of a step have constant shapes and addresses, so the step is recorded once as a CUDA
graph and replayed for every token by a single call. Sampling and the detection of stop tokens are part of the graph;
the host reads from the GPU only once per :data:`TOKENS_PER_CHECK` tokens.

Every response has a row of the KV cache. The number of rows and the number of columns are rounded up, so that few
graphs are needed. The sampled tokens are those of :class:`lrl.lm.decoding.DecodeLoop` for the same random bits, as long
as rounding does not change them.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lrl.lm.attention import HALVED, compute_dtype, kernel_of
from lrl.lm.forward import pass_limit
from lrl.lm.fused_parts import fused_parts, join_weights
from lrl.lm.logprobs import sample_tokens, sampling_logprobs
from lrl.lm.prefill import Prefilled
from lrl.types import SamplingConfig

TOKENS_PER_CHECK = 8
"""Number of tokens between two checks whether all responses have ended."""
_MAX_GRAPHS = 8
"""Number of graphs that are kept per model."""
_NEAR, _NEAR_HALVED = 1e-3, 0.25
"""Largest difference, in nats, between log-probabilities of a recorded step and of the model, in 32 and in 16 bits."""
_WARM_UP = 2
"""Number of steps that are computed before a graph is recorded, in which libraries allocate their workspaces."""


def _write(keys: Tensor, values: Tensor, column: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Write one column of keys and values, see :meth:`_StaticLayer.update`."""
    keys.index_copy_(2, column, new_keys)
    values.index_copy_(2, column, new_values)


@final
class _StaticLayer(DynamicLayer):
    """A layer of the KV cache with a constant number of columns.

    Args:
        keys: ``(row, head, column, size)``.
        values: of the same shape.
        column: index of the column that the next token is written to, int64 ``(1,)``.
    """

    write: Callable[..., None] = staticmethod(_write)
    """:func:`_write`, or a compiled version of it."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.column = column
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one column ``(row, head, 1, size)`` of keys and values, and return all columns."""
        self.write(self.keys, self.values, self.column, key_states, value_states)
        return self.keys, self.values


@final
class StaticDecoding:
    """The tensors of a decoding step, and the step as a CUDA graph.

    Args:
        model: called as a Hugging Face causal LM is; every layer must attend to all earlier tokens.
        like: prompts with a KV cache of the model, from which shapes and data types are taken.
        rows: number of rows.
        columns: number of columns of the prompts.
        sampling: the distribution to sample from, and the maximum number of tokens of a response.
        stop: ids of the tokens that end a response, int64 ``(token,)``.
    """

    def __init__(
        self, model: Any, like: Prefilled, rows: int, columns: int, sampling: SamplingConfig, stop: Tensor
    ) -> None:
        device, dtype, steps = like.logits.device, compute_dtype(model), sampling.max_new_tokens
        self._model = ref(model)  # not the model itself, which is a weak key of the dictionary of graphs
        self.sampling, self.stop, self.columns = sampling, stop, columns
        self.hidden = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).min
        """Value of the mask for columns that are not attended to."""
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.number = torch.zeros(1, dtype=torch.long, device=device)
        """Number of tokens of each unfinished response so far, int64 ``(1,)``."""
        self.mask = torch.full((rows, 1, 1, columns + steps), self.hidden, dtype=dtype, device=device)
        self.bits = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        """Number of tokens of each finished response, and the maximum number for the others, int64 ``(row,)``."""
        self.out_ids = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self.out_logprobs = torch.zeros(rows, steps, device=device, dtype=torch.promote_types(dtype, torch.float32))
        self.layers = [self._layer(layer, rows, columns + steps) for layer in like.cache.layers]
        self.cache = DynamicCache()
        self.cache.layers = list[Any](self.layers)
        self.size = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
        """Size of the KV cache in bytes."""
        self.graph: Any = None

    def _layer(self, like: Any, rows: int, columns: int) -> _StaticLayer:
        """Return an empty layer of the cache with the number of heads and the data type of a layer ``like``."""
        _, heads, _, size = like.keys.shape
        keys = like.keys.new_zeros(rows, heads, columns, size)
        return _StaticLayer(keys, like.values.new_zeros(rows, heads, columns, like.values.shape[-1]), self.column)

    @property
    def model(self) -> Any:
        """The model, which exists as long as it is called."""
        return self._model()

    def record(self) -> None:
        """Record :meth:`step` as a CUDA graph, with compiled parts if possible.

        Without a graph, every step is computed. A warning says, once per class of model, what could not be done.

        Raises:
            torch.OutOfMemoryError: If the GPU has too little memory.
        """
        for compiled, missing in ((True, "compiled parts"), (False, "a CUDA graph")):
            try:
                self._record(compiled)
                return
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # there is no C compiler, or the model reads from the GPU
                self.graph = None
                for layer in self.layers:
                    layer.write = _write
                reason = str(error).strip().partition("\n")[0]
                if (type(self.model), missing) in _warned:
                    continue
                _warned.add((type(self.model), missing))
                logging.getLogger("lrl").warning("decoding is slower, without %s: %s", missing, reason)

    def _record(self, compiled: bool) -> None:
        """Record :meth:`step`, see :meth:`record`.

        Raises:
            RuntimeError: If the step cannot be recorded, or the graph computes other log-probabilities.
        """
        with torch.cuda.device(self.ids.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with fused_parts(self.model, compiled), self._autocast():
                for layer in self.layers if compiled else ():
                    layer.write = torch.compile(_write)
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UP):
                        self._reset()
                        self.step()
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                self._reset()
                with torch.cuda.graph(graph, stream=stream):
                    self.step()
            expected, found = self._first_sample(self.step), self._first_sample(graph.replay)
        near = _NEAR_HALVED if self.mask.dtype in HALVED else _NEAR
        if not torch.allclose(expected, found, atol=near, rtol=0):
            raise RuntimeError("the graph computes other log-probabilities than the model")
        self.graph = graph

    def _first_sample(self, step: Callable[[], None]) -> Tensor:
        """Return the log-probabilities ``(row,)`` that a step samples after a single token; for :meth:`_record`."""
        self._reset()
        self.mask.fill_(self.hidden)
        self.ids.zero_()
        self.positions.zero_()
        step()
        return self.out_logprobs[:, 0].clone()

    def _reset(self) -> None:
        """Let the next token be the first one after the prompt."""
        self.column.fill_(self.columns)
        self.number.zero_()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """Disable the cache of autocast, whose converted weights would be freed after the recording."""
        if not torch.is_autocast_enabled("cuda"):
            yield
            return
        with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
            yield

    def step(self) -> None:
        """Compute the logits after the last token of each row, and sample the next token."""
        self.mask.index_fill_(3, self.column, 0.0)
        logits = self.model(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.positions.add_(1)
        self.column.add_(1)
        self.sample(logits)

    def sample(self, logits: Tensor) -> None:
        """Sample the next token of each row from logits ``(row, vocabulary)``."""
        logprobs = sampling_logprobs(logits, self.sampling)
        token = sample_tokens(logprobs, self.bits.index_select(1, self.number)[:, 0])[:, None]
        self.out_ids.index_copy_(1, self.number, token)
        self.out_logprobs.index_copy_(1, self.number, logprobs.gather(1, token).to(self.out_logprobs.dtype))
        self.ids.copy_(token)
        self.number.add_(1)
        ends = torch.isin(token[:, 0], self.stop) & ~self.finished
        self.lengths.copy_(torch.where(ends, self.number, self.lengths))
        self.finished.logical_or_(ends)

    def begin(self, filled: Prefilled, prompt: Tensor, bits: Tensor) -> None:
        """Copy prompts into the cache, and sample the first token of each response.

        Args:
            filled: prompts with their KV cache.
            prompt: index of the prompt of each response, int64 ``(response,)``.
            bits: 64 random bits for each token, int64 ``(response, token)``.
        """
        responses, width = len(prompt), filled.mask.shape[1]
        before = self.columns - width
        read: list[Any] = filled.cache.layers
        for own, other in zip(self.layers, read, strict=True):
            own.keys.zero_()  # a NaN of an earlier call would pass through the mask
            own.values.zero_()
            own.keys[:responses, :, before : self.columns] = other.keys[prompt]
            own.values[:responses, :, before : self.columns] = other.values[prompt]
        self.mask.fill_(self.hidden)
        self.mask[:responses, 0, 0, before : self.columns].masked_fill_(filled.mask[prompt], 0.0)
        self.positions.zero_()
        self.positions[:responses] = filled.mask.sum(1)[prompt, None]
        self._reset()
        self.bits.zero_()
        self.bits[:responses] = bits[:, : self.bits.shape[1]]
        self.finished.fill_(True)
        self.finished[:responses] = False
        self.lengths.fill_(self.bits.shape[1])
        logits = filled.logits.new_zeros(len(self.ids), filled.logits.shape[1])
        logits[:responses] = filled.logits[prompt]
        self.sample(logits)

    def run(self, steps: int, stops: Callable[[list[int]], bool] | None, responses: int) -> Sampled:
        """Sample the remaining tokens of each response.

        Args:
            steps: maximum number of tokens of a response.
            stops: whether the token ids of a response so far end with the stop text; None if there is none.
            responses: number of rows that are responses.
        """
        number, checked = 1, 0
        while number < steps:
            for _ in range(min(TOKENS_PER_CHECK, steps - number)):
                self.step() if self.graph is None else self.graph.replay()
                number += 1
            if stops is not None:
                self._end_by_text(stops, checked, number, responses)
                checked = number
            if bool(self.finished.all()):
                break
        lengths = self.lengths[:responses].clamp(max=number)
        width = int(lengths.max())
        mask = torch.arange(width, device=lengths.device) < lengths[:, None]
        ids, logprobs = self.out_ids[:responses, :width], self.out_logprobs[:responses, :width]
        return Sampled(ids=ids * mask, mask=mask, logprobs=torch.where(mask, logprobs, 0.0))

    def _end_by_text(self, stops: Callable[[list[int]], bool], checked: int, number: int, responses: int) -> None:
        """End the responses that contain the stop text.

        Args:
            stops: whether the token ids of a response so far end with the stop text.
            checked: number of tokens of each response that were checked before.
            number: number of tokens of each unfinished response.
            responses: number of rows that are responses.
        """
        ids, lengths = self.out_ids[:responses, :number].tolist(), self.lengths[:responses].tolist()
        for row, (tokens, length) in enumerate(zip(ids, lengths, strict=True)):
            sizes = range(checked + 1, min(length, number) + 1)
            lengths[row] = next((size for size in sizes if stops(tokens[:size])), length)
        self.lengths[:responses] = torch.tensor(lengths, device=self.lengths.device)
        self.finished[:responses] = self.lengths[:responses] <= number


class Sampled(NamedTuple):
    """Sampled responses, with the fields of :class:`lrl.lm.decoding.Responses`."""

    ids: Tensor
    mask: Tensor
    logprobs: Tensor


_graphs: WeakKeyDictionary[nn.Module, OrderedDict[tuple[Any, ...], StaticDecoding]] = WeakKeyDictionary()
"""The graphs of each model by what they depend on, the least recently used first."""
_warned: set[tuple[type, str]] = set()
"""Classes of models, and what could not be done for them, see :meth:`StaticDecoding.record`."""
_lock = threading.Lock()
"""Held while a graph is replayed, because its tensors hold the responses of one call."""


def can_record(model: Any) -> bool:
    """Return whether decoding steps of a model can be recorded: its weights are on one GPU and not sharded."""
    devices = {weight.device for weight in model.parameters()}
    return len(devices) == 1 and devices.pop().type == "cuda" and not is_sharded(model)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a strategy keeps the weights in shards, also while they are gathered: FSDP or DeepSpeed."""
    if any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in model.modules()):
        return True
    return any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())


def sample_responses(
    model: Any,
    filled: Prefilled,
    prompt: Tensor,
    bits: Tensor,
    sampling: SamplingConfig,
    stop: Tensor,
    stops: Callable[[list[int]], bool] | None,
) -> Sampled:
    """Sample responses to prompts; on a GPU, by a recorded graph.

    Args:
        model: called as a Hugging Face causal LM is; every layer must attend to all earlier tokens.
        filled: distinct prompts with their KV cache.
        prompt: index of the prompt of each response, int64 ``(response,)``.
        bits: 64 random bits for each token, int64 ``(response, token)``.
        sampling: the distribution to sample from, and the maximum number of tokens.
        stop: ids of the tokens that end a response, int64 ``(token,)``.
        stops: whether the token ids of a response so far end with the stop text; None if there is none.
    """
    rows = _most_rows(filled, sampling.max_new_tokens)
    parts = []
    with _lock:
        for some, own_bits in zip(prompt.split(rows), bits.split(rows), strict=True):
            decoding = _decoding(model, filled, len(some), sampling, stop)
            decoding.begin(filled, some, own_bits)
            parts.append(decoding.run(sampling.max_new_tokens, stops, len(some)))
    width = max(part.ids.shape[1] for part in parts)
    padded = [[functional.pad(field, (0, width - field.shape[1])) for field in part] for part in parts]
    return Sampled(*map(torch.cat, zip(*padded, strict=True)))


def _most_rows(filled: Prefilled, steps: int) -> int:
    """Return the number of rows, a power of two, whose KV cache takes at most :func:`lrl.lm.forward.pass_limit` bytes.

    Args:
        filled: distinct prompts with their KV cache.
        steps: maximum number of tokens of a response.
    """
    rows = pass_limit(filled.logits.device) // _bytes_per_row(filled, steps)
    return 1 << max(0, rows.bit_length() - 1)


def _bytes_per_row(filled: Prefilled, steps: int) -> int:
    """Return the size of a row of the KV cache; see :func:`_most_rows`."""
    layers: list[Any] = filled.cache.layers
    per_column = sum(layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in layers)
    return per_column * (rounded_columns(filled.mask.shape[1]) + steps)


def _decoding(model: Any, filled: Prefilled, responses: int, sampling: SamplingConfig, stop: Tensor) -> StaticDecoding:
    """Return the decoding for a number of responses, recorded if the model is on a GPU and this has not been done."""
    rows, columns = 1 << (responses - 1).bit_length(), rounded_columns(filled.mask.shape[1])
    on_gpu = filled.logits.device.type == "cuda"
    if on_gpu:
        join_weights(model)
    state = _state_of(model)
    key = rows, columns, sampling, tuple(stop.tolist()), state
    kept = _graphs.setdefault(model, OrderedDict())
    if key not in kept:
        for old in [old for old in kept if old[-1] != state]:
            del kept[old]
        size = rows * _bytes_per_row(filled, sampling.max_new_tokens)
        limit = pass_limit(filled.logits.device)
        while kept and (len(kept) >= _MAX_GRAPHS or size + sum(one.size for one in kept.values()) > limit):
            kept.popitem(last=False)
        with torch.inference_mode(False), torch.no_grad():  # its tensors are used outside inference mode as well
            decoding = StaticDecoding(model, filled, rows, columns, sampling, stop)
            if on_gpu and sampling.max_new_tokens > 1:
                decoding.record()
        kept[key] = decoding
    kept.move_to_end(key)
    return kept[key]


def rounded_columns(width: int) -> int:
    """Return the number of columns for prompts of up to ``width`` tokens: a multiple of 32 or of a larger number."""
    step = max(32, 1 << max(0, width.bit_length() - 3))
    return -(-width // step) * step


def _state_of(model: Any) -> Hashable:
    """Return what a recorded step depends on besides shapes: addresses of weights, adapters, data types and kernel."""
    layers = [part for part in model.modules() if hasattr(part, "base_layer")]
    adapters = [(tuple(part.active_adapters), bool(part.merged), bool(part.disable_adapters)) for part in layers]
    return (
        hash(tuple(weight.data_ptr() for weight in (*model.parameters(), *model.buffers()))),
        hash(tuple(adapters)),
        compute_dtype(model),
        kernel_of(model),
    )
