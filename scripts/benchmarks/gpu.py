"""Decoding, training steps, precision and memory on a GPU, at the shapes of published models.

The models have random weights, except ``smollm2-135m`` if ``lrl fetch smollm2`` has been run. The measurements are
written to the file of ``--json`` one by one. A further call with this file continues where the last one ended; a
measurement that failed is kept with its error, and is repeated only with ``--retry``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import importlib.util
import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import lightning as L
import numpy as np
import torch
from benchmarks import grpo, sft
from benchmarks.decode import Decoding
from benchmarks.runs import CONFIGS, config_run, ending, fit
from benchmarks.shapes import PUBLISHED, SHAPES, folder
from benchmarks.timing import compare, configure_on, now
from torch import Tensor

from lrl.lm.attention import bare
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.policies.text import TextPolicy
from lrl.types import RandomKeys, SamplingConfig, TurnBatch

Found = dict[str, Any]
Item = tuple[str, Callable[[], Found]]
"""Name of a measurement in the report, and the function that takes it."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    prompts: int = 32
    """Distinct prompts of a decoding measurement, whose responses are alone or in groups of ``group``."""
    group: int = 8
    """Responses to a prompt, also in a training step."""
    num_groups: int = 8
    """Prompts of a training step."""
    prompt_tokens: int = 100
    new_tokens: int = 128
    demonstrations: int = 1024
    copied: int = 4_000_000_000
    """Bytes of the copy that measures the bandwidth of the memory."""


SIZES = {"cuda": Sizes(), "cpu": Sizes(4, 2, 2, 20, 8, 64, 4_000_000)}


def models_of(options: argparse.Namespace, *names: str) -> list[str]:
    """Return those of the chosen models that a part measures; ``tiny`` is measured in all parts."""
    return [name for name in options.models if name in (*names, "tiny")]


def tried(notes: Found, key: str, function: Callable[..., Any], *given: Any) -> Any:
    """Return the result of a function; None if it fails, with the error in the notes."""
    try:
        return function(*given)
    except Exception:
        notes[key] = ending(traceback.format_exc())
    return None


# Decoding.


@cache
def bandwidth(device: str, size: int) -> float:
    """Return the bytes per second that a copy within the memory reads and writes, as the median of ten copies."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds = list[float]()
    for _ in range(11):
        started = now()
        target.copy_(source)
        seconds.append(now() - started)
    return 2 * size / statistics.median(seconds[1:])


def bytes_per_step(model: Any, texts: int, cells: float) -> float:
    """Return the bytes that a decoding step reads at least: every weight and every entry of the KV cache, once.

    Args:
        model: a Hugging Face causal LM.
        texts: number of tokens of the step, whose embeddings are read if they are not those of the head.
        cells: number of tokens in the KV cache.
    """
    config, table = model.config, model.get_input_embeddings().weight
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if table is not model.get_output_embeddings().weight:
        weights -= (len(table) - texts) * table.shape[1] * table.element_size()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cell = 2 * config.num_hidden_layers * config.num_key_value_heads * head * table.element_size()
    return weights + cells * cell


def decode_items(options: argparse.Namespace) -> Iterator[Item]:
    """Yield the measurements of decoding."""
    sizes = SIZES[options.device]
    for model in models_of(options, *PUBLISHED):
        for group in (1, sizes.group):
            name = f"decode/{model}/{sizes.prompts * group} rows"
            yield name, partial(decoding, options, model, group)
            if importlib.util.find_spec("vllm") is not None:
                yield f"{name} of vLLM", partial(vllm_decoding, options, model, group)


def decoding(options: argparse.Namespace, model: str, group: int) -> Found:
    """Compare decoding with ``generate``, and with the time in which the memory is read once."""
    sizes, where = SIZES[options.device], folder(model, options.device)
    whole = SamplingConfig(max_new_tokens=sizes.new_tokens)
    settings = {"prompt_tokens": sizes.prompt_tokens, "max_new_tokens": sizes.new_tokens, "temperature": 1.0}
    given = argparse.Namespace(
        model=where, dtype="bfloat16", device=options.device, llama_cpp=None, precision=None, **settings
    )
    both = Decoding(given, sizes.prompts, group)
    rows = sizes.prompts * group
    seconds: dict[str, Callable[[SamplingConfig], float]] = {"ours": both.our_seconds, "theirs": both.their_seconds}
    notes: Found = {name: getattr(both.model, name) for name in ("share", "kernel", "attends_to_all")}
    if options.device == "cuda":
        notes["gpu"] = torch.cuda.get_device_name()
    for side, of in seconds.items():
        notes[f"first_call_seconds_{side}"] = of(whole)
    rates = [lambda of=of: rows * sizes.new_tokens / of(whole) for of in seconds.values()]
    row = compare(
        f"decoding against generate, {model}, {rows} rows",
        "tokens",
        rates[0],
        rates[1],
        options.repeats,
        warm=True,
        **notes,
    )
    row["all_tokens_sampled"] = tuple(both.ids.shape) == (rows, sizes.new_tokens)
    rate, sampled = bandwidth(options.device, sizes.copied), rows * sizes.new_tokens / 2
    least, least_if_shared = (
        bytes_per_step(bare(both.model.model), rows, texts * sizes.prompt_tokens + sampled) / rate
        for texts in (rows, sizes.prompts)  # each response, or each group, has a copy of its prompt in the cache
    )
    row |= {"copied_bytes_per_second": rate}
    row |= {"least_seconds_per_step": least, "least_seconds_per_step_if_prompts_are_shared": least_if_shared}
    for side, of in seconds.items():
        one = [of(dataclasses.replace(whole, max_new_tokens=1)) for _ in range(options.repeats + 1)]
        prefill = statistics.median(one[1:])
        step = (rows * sizes.new_tokens / statistics.median(row[side]) - prefill) / (sizes.new_tokens - 1)
        row |= {f"prefill_seconds_{side}": prefill, f"seconds_per_step_{side}": step, f"roofline_{side}": least / step}
    return {"comparison": row}


def vllm_decoding(options: argparse.Namespace, model: str, group: int) -> Found:
    """Return the tokens per second of vLLM."""
    sizes, vllm = SIZES[options.device], importlib.import_module("vllm")
    engine = vllm.LLM(model=folder(model, options.device), dtype="bfloat16", gpu_memory_utilization=0.5, seed=0)
    sampling = vllm.SamplingParams(n=group, temperature=1.0, max_tokens=sizes.new_tokens, ignore_eos=True)
    rates = list[float]()
    for repeat in range(options.repeats + 1):
        words = np.random.default_rng(repeat).integers(100, 1900, (sizes.prompts, sizes.prompt_tokens)).tolist()
        started = now()
        engine.generate([{"prompt_token_ids": ids} for ids in words], sampling, use_tqdm=False)
        rates.append(sizes.prompts * group * sizes.new_tokens / (now() - started))
    return {"tokens_per_second": rates[1:]}


# Training steps.


def step_options(options: argparse.Namespace, model: str, lora_r: int | None) -> argparse.Namespace:
    """Return options of ``benchmark.py grpo`` and ``benchmark.py sft``, in bfloat16.

    Adapters have float32 weights and compute in bfloat16, as in TRL.
    """
    sizes = SIZES[options.device]
    return argparse.Namespace(
        model=folder(model, options.device),
        dtype="bfloat16",
        device=options.device,
        precision="bf16-true" if lora_r is None else "bf16-mixed",
        lora_r=lora_r,
        last_layers=None,
        num_groups=sizes.num_groups,
        group_size=sizes.group,
        max_new_tokens=sizes.new_tokens,
        demonstrations=sizes.demonstrations,
        batch_size=8,
        pack_tokens=512,
        pack_rows=4,
        steps=1,
        repeats=options.repeats,
    )


ADAPTERS = {"LoRA": 16, "all weights": None}
"""Rank of the adapters, by what is trained."""


def grpo_items(options: argparse.Namespace) -> Iterator[Item]:
    """Yield the measurements of GRPO steps."""
    for model in models_of(options, *PUBLISHED[:3]):
        for what, rank in ADAPTERS.items():
            yield f"grpo/{model}/{what}", partial(grpo_step, options, model, what, rank)


def grpo_step(options: argparse.Namespace, model: str, what: str, rank: int | None) -> Found:
    """Compare a GRPO step with TRL; lrl is measured alone if TRL fails."""
    given = step_options(options, model, rank)
    ours, notes, found = grpo.Ours(given, SIZES["cuda"].prompt_tokens), Found(), Found()
    theirs = tried(found, "error_of_trl", grpo.Theirs, given, ours)
    row = None
    if theirs is not None:
        checked = tried(notes, "check", grpo.compare_first_batch, ours.module, theirs.trainer, grpo.tolerance(given))
        notes |= checked or {}
        row = tried(found, "error_of_comparison", grpo.timed, given, ours, theirs, notes, True)
    if row is None:
        return found | notes | {"completions_per_second": [ours.rate() for _ in range(options.repeats)]}
    row |= {"name": f"GRPO step against TRL, {model}, {what}", "update_seconds": ours.update_seconds}
    return found | {"comparison": row}


def sft_items(options: argparse.Namespace) -> Iterator[Item]:
    """Yield the measurements of SFT."""
    for model in models_of(options, *PUBLISHED[:3]):
        for what, rank in ADAPTERS.items():
            yield f"sft/{model}/{what}", partial(sft_step, options, model, what, rank)


def sft_step(options: argparse.Namespace, model: str, what: str, rank: int | None) -> Found:
    """Compare SFT with TRL without activation checkpointing, on padded and on packed rows."""
    given, notes, rows = step_options(options, model, rank), Found(), list[Found]()
    given.steps = 12 if options.device == "cuda" else 1
    row = tried(notes, "check", sft.padded, given, False)
    row = row or tried(notes, "error_padded", sft.padded, given, False, False)
    both = {"padded": row, "packed": tried(notes, "error_packed", sft.packed, given)}
    for rows_are, one in both.items():
        if one is not None:
            rows.append(one | {"name": f"SFT against TRL, {model}, {what}, {rows_are} rows"})
    return notes | {"comparisons": rows}


# Precision of the recorded log-probabilities.

PARITY = {
    "float32": {"dtype": "float32"},
    "float32, LoRA": {"dtype": "float32", "rank": 16},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, LoRA": {"dtype": "bfloat16", "rank": 16},
    "bfloat16, LoRA, bf16-mixed": {"dtype": "bfloat16", "rank": 16, "autocast": True},
    "NF4, LoRA": {"dtype": "bfloat16", "rank": 16, "quantization": "nf4"},
}


def parity_items(options: argparse.Namespace) -> Iterator[Item]:
    """Yield the comparisons of sampled and teacher-forced log-probabilities."""
    for model in models_of(options, *PUBLISHED[:2]):
        for name, settings in PARITY.items():
            if "quantization" not in settings or importlib.util.find_spec("bitsandbytes") is not None:
                yield f"parity/{model}/{name}", partial(parity, options, model, **settings)


def parity(
    options: argparse.Namespace,
    model: str,
    dtype: str,
    rank: int | None = None,
    autocast: bool = False,
    quantization: str | None = None,
) -> Found:
    """Return differences between log-probabilities of sampling and of training, in nats, and the first ratio."""
    sizes, lora = SIZES[options.device], None if rank is None else LoRAConfig(r=rank, alpha=2 * rank)
    config = LanguageModelConfig(
        name=folder(model, options.device), dtype=dtype, lora=lora, quantization=quantization, recompute_logprobs=False
    )
    states = grpo.States(sizes.num_groups, sizes.prompt_tokens)
    policy = TextPolicy(config, states.prompt(), SamplingConfig(max_new_tokens=sizes.new_tokens))
    policy.connect(states.codec)
    configure_on(options.device, policy)
    language_model, found = policy.language_model, Found()
    precision = torch.autocast(options.device, torch.bfloat16) if autocast else nullcontext()
    changed: AbstractContextManager[None] = nullcontext()
    if lora is not None:
        changed = grpo.moved(language_model.model)  # new adapters do not change the output
    with torch.no_grad(), precision, changed:
        for recompute in (False, True):
            language_model.config = dataclasses.replace(config, recompute_logprobs=recompute)
            difference = logprob_differences(policy, states, sizes.group)
            if not recompute:
                found |= {"mean_nats": float(difference.mean()), "max_nats": float(difference.max())}
            ratio = float((difference.exp() - 1).max())
            found["max_ratio_recomputed" if recompute else "max_ratio"] = 1 + ratio
    kept = {"share": language_model.share, "cached": language_model.cached, "kernel": language_model.kernel}
    return found | kept | {"tokens": len(difference)}


def logprob_differences(policy: TextPolicy, states: grpo.States, group: int) -> Tensor:
    """Return absolute differences between recorded and evaluated log-probabilities of sampled tokens, ``(token,)``."""
    observations = [row.observation for row in states.rows() for _ in range(group)]
    number = np.arange(len(observations))
    keys = RandomKeys(seed=0, purpose="benchmark", collection=0, env=number, turn=0 * number)
    decisions = policy.act(observations, [()] * len(number), keys, policy.sampling)
    mask, logprobs = decisions.response_mask, decisions.logprobs
    assert logprobs is not None
    batch = TurnBatch(inputs=decisions.inputs, response_mask=mask, old_logprobs=logprobs, advantages=0 * logprobs)
    return (policy.evaluate(batch).logprobs - logprobs)[mask].abs().double()


# Memory.


class Peaks(L.Callback):
    """Records the largest allocated memory of the collection and of the update, in GB."""

    def __init__(self) -> None:
        self.gigabytes = dict[str, float]()
        self.record("earlier_gb")  # what was allocated before is not part of the collection
        self.gigabytes.clear()

    def record(self, phase: str) -> None:
        """Record the largest memory since the last call."""
        if torch.cuda.is_available():
            self.gigabytes[phase] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(self, *_: Any) -> None:
        """Record the collection."""
        self.record("collection_gb")

    def on_train_epoch_end(self, *_: Any) -> None:
        """Record the update."""
        self.record("update_gb")


MEMORY = {"LoRA": (16, None), "NF4 LoRA": (16, "nf4"), "all weights": (None, None)}


def memory_items(options: argparse.Namespace) -> Iterator[Item]:
    """Yield the measurements of memory."""
    for model in models_of(options, "qwen2.5-0.5b", "llama-3.2-3b"):
        for what, (rank, quantization) in MEMORY.items():
            for recompute in (True, False):
                name = f"memory/{model}/{what}, gradient checkpointing {'on' if recompute else 'off'}"
                if quantization is None or importlib.util.find_spec("bitsandbytes") is not None:
                    yield name, partial(peak_memory, options, model, rank, quantization, recompute)


def peak_memory(
    options: argparse.Namespace, model: str, rank: int | None, quantization: str | None, recompute: bool
) -> Found:
    """Return the largest memory of a GRPO step, and its seconds."""
    given, peaks = step_options(options, model, rank), Peaks()
    ours = grpo.Ours(given, SIZES["cuda"].prompt_tokens, quantization=quantization, gradient_checkpointing=recompute)
    started = now()
    ours.train(1, peaks)
    return peaks.gigabytes | {"seconds": now() - started, "turns": given.num_groups * given.group_size}


# Whole runs of the command line.


def fsdp_items(options: argparse.Namespace) -> Iterator[Item]:
    """Yield two collections with each overlay that needs a GPU, on one device."""
    for overlay in ("fsdp", "bf16", "qlora"):
        words = ["--config", "configs/frozen_lake/grpo.yaml", "--config", f"configs/overlays/{overlay}.yaml"]
        yield f"fsdp/{overlay}.yaml", partial(fit, options.device, words)


def configs_items(options: argparse.Namespace) -> Iterator[Item]:
    """Yield two collections of each configuration that needs a GPU."""
    for name, model in CONFIGS.items():
        yield (
            f"configs/{name}",
            partial(config_run, options.device, name, "tiny" if options.models == ["tiny"] else model),
        )


# The report.

PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[Item]]] = {
    "decode": decode_items,
    "grpo": grpo_items,
    "parity": parity_items,
    "memory": memory_items,
    "sft": sft_items,
    "fsdp": fsdp_items,
    "configs": configs_items,
}


class OutOfTimeError(BaseException):
    """The call has reached its time limit; a measurement does not handle this as one of its errors."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`OutOfTimeError` inside the ``with`` block after some seconds."""

    def stop(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measured(measure: Callable[[], Found], limit: float) -> Found:
    """Take a measurement, and return its result or its error."""
    started = time.monotonic()
    try:
        with limited(limit):
            found = measure()
    except (Exception, OutOfTimeError) as error:
        found = {"error": ending(traceback.format_exc()), "out_of_time": int(isinstance(error, OutOfTimeError))}
    for _ in range(2):  # frees the models
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        found["not_freed_gb"] = torch.cuda.memory_allocated() / 1e9
    return found | {"measured_in_seconds": time.monotonic() - started}


def report(items: Mapping[str, Found]) -> Found:
    """Return the report with all measurements, and the rows of the table of comparisons."""
    rows = [row for found in items.values() for row in found.get("comparisons", ())]
    rows += [found["comparison"] for found in items.values() if "comparison" in found]
    return {"title": "on a GPU in bfloat16", "bar": None, "items": dict(items), "comparisons": rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py gpu``."""
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED), choices=list(SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=500, help="no measurement begins after this time")
    parser.add_argument("--grace", type=float, default=50, help="seconds that the last measurement has after this time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--retry", action="store_true", help="repeat measurements that failed")


def main(options: argparse.Namespace) -> Iterator[Found]:
    """Take the measurements that the report does not have yet, and yield the report after each of them."""
    started = time.monotonic()
    if options.json is not None and options.json.suffix != ".json":
        options.json = options.json / "benchmark_gpu.json"
    items: dict[str, Found] = {}
    if options.json is not None and options.json.exists():
        items = json.loads(options.json.read_text())["items"]
    again = {
        name
        for name, found in items.items()
        if found.get("out_of_time") == 1 or ("error" in found and options.retry)  # a second time out is final
    }
    todo = [item for part in options.parts for item in PARTS[part](options)]
    todo = [(name, measure) for name, measure in todo if name not in items or name in again]
    for index, (name, measure) in enumerate(todo):
        left = options.seconds - (time.monotonic() - started)
        if left <= 0:
            print(f"{len(todo) - index} measurements are left; run the command again")
            break
        print(f"--- {name}", flush=True)
        before = items.get(name, {}).get("out_of_time", 0)
        items[name] = measured(measure, left + options.grace)
        if items[name].get("out_of_time"):
            items[name]["out_of_time"] += before
        print(json.dumps(items[name], default=str)[:2000], flush=True)
        yield report(items)
        if tried({}, "", now) is None:
            print("the GPU reports an error from which this process cannot recover; run the command again")
            break
    yield report(items)
