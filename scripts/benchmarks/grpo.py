"""One GRPO step, rollout and update, against TRL's ``GRPOTrainer``.

Both start from the same weights and see the same prompts, in groups of 8, with the KL term and its reference, one
optimiser step per rollout, float32 unless ``--dtype`` says otherwise; with ``--lora_r`` both train the same adapters,
in all layers or in the last ones. TRL runs through its own ``train()``, with Hugging Face's ``generate``, and with
all that costs time switched off: checkpointing of activations, logging, saving. Ours runs
through Lightning's ``fit()``. Rates are taken from the end of the first step to the end of the last.
"""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
from benchmarks.first_batch import compare_first_batch
from benchmarks.timing import Comparison, alternate, finish, quiet, write

from lrl.algorithms.grpo import GRPOModule
from lrl.codecs.codec import TextCodec
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.frozen_lake import named_map
from lrl.envs.prompt_env import PromptEnvs, RowSource
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.loading import load_base
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate, get_response_format
from lrl.rewards.reward import Reward, Row
from lrl.training.credit import KLConfig
from lrl.training.optimizer import OptimizerConfig
from lrl.types import PastTurn, SamplingConfig

KL_COEF, CLIP_RANGE, LR, MAX_GRAD_NORM = 0.04, 0.2, 1e-6, 1.0
BAR = 3.0
THINK = get_response_format("think_answer")


class States(RowSource):
    """The first states of the 4x4 map as prompts of about 30, 100 or 300 tokens."""

    codec: TextCodec = FrozenLakeCodec()

    def __init__(self, num_prompts: int, tokens: int) -> None:
        self.num_prompts, self.tokens = num_prompts, tokens

    def rows(self) -> list[Row]:
        """Return one row per state; the Q-values are not used."""
        texts = [render_map(state, named_map("4x4")) for state in range(self.num_prompts)]
        texts = [text.splitlines()[0] for text in texts] if self.tokens < 100 else texts
        return [Row(observation=text, q_values=(1.0, 0.0, 0.0, 0.0), action=0) for text in texts]

    def prompt(self) -> PromptTemplate:
        """Return the template: the end token ends a response, so neither library needs a stop string."""
        system = THINK.instruction if self.tokens < 100 else f"{self.codec.description} {THINK.instruction}"
        example = PastTurn(render_map(0, named_map("4x4")), THINK.render("DOWN", "I look around, then I decide."))
        examples = (example,) * max(0, round((self.tokens - 105) / 49))
        return PromptTemplate(response_format="direct", system=system, examples=examples)


def pay(text: str) -> float:
    """Return a reward that takes no time and differs within a group."""
    return float(text.count("e") % 5)


class Vowels(Reward):
    """:func:`pay` as a reward of lrl."""

    name = "vowels"

    def __call__(self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | None]) -> np.ndarray:
        """Return the reward of each response."""
        return np.array([pay(response) for response in responses])


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    """Return :func:`pay` as a reward function of TRL."""
    return [pay(completion) for completion in completions]


class Clock(L.Callback):
    """Records the time at the end of each step of lrl, and the number of tokens sampled before."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())


def adapters(options: argparse.Namespace) -> LoRAConfig | None:
    """Return the adapters of lrl; None where all weights are trained."""
    if options.lora_r is None:
        return None
    return LoRAConfig(r=options.lora_r, alpha=2 * options.lora_r, last_layers=options.last_layers)


class Ours:
    """Runs of lrl."""

    def __init__(self, options: argparse.Namespace, tokens: int) -> None:
        self.options, self.states = options, States(options.num_groups, tokens)
        policy = TextPolicy(
            LanguageModelConfig(name=options.model, dtype=options.dtype, lora=adapters(options)),
            self.states.prompt(),
            SamplingConfig(max_new_tokens=options.max_new_tokens),
            max_prompt_tokens=2048,
        )
        policy.connect(self.states.codec)
        optimizer, kl = OptimizerConfig(lr=LR), KLConfig(coef=KL_COEF)
        self.module = GRPOModule(policy, optimizer, CLIP_RANGE, kl=kl, loss_normalisation="sequence")
        self.module.configure_model()
        self.response_tokens = 0.0

    @property
    def prompts(self) -> list[str]:
        """Return the prompts as text."""
        policy: Any = self.module.policy
        ids = [policy.encode(row.observation, ()) for row in self.states.rows()]
        return [policy.language_model.tokenizer.tokenizer.decode(prompt) for prompt in ids]

    def rate(self) -> float:
        """Return completions per second over several steps."""
        clock, options = Clock(), self.options
        data = RolloutDataModule(
            PromptEnvs(self.states, [Vowels()]), num_groups=options.num_groups, group_size=options.group_size
        )
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=options.steps + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            use_distributed_sampler=False,
            gradient_clip_val=MAX_GRAD_NORM,
            callbacks=[clock],
        )
        trainer.fit(self.module, datamodule=data)
        self.response_tokens = data.clocks["tokens"] / data.clocks["episodes"]
        return options.steps * options.num_groups * options.group_size / (clock.times[-1] - clock.times[0])


class Theirs:
    """Runs of TRL."""

    def __init__(self, options: argparse.Namespace, ours: Ours) -> None:
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from transformers import PrinterCallback
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

        self.options, self.clock = options, _clock_callback()
        batch = options.num_groups * options.group_size
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=options.dtype == "bfloat16",
            activation_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=batch,
            num_generations=options.group_size,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            num_iterations=1,
            max_steps=options.steps + 1,
            learning_rate=LR,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler_type="constant",
            beta=KL_COEF,
            use_bias_correction_kl=False,
            epsilon=CLIP_RANGE,
            loss_type="grpo",
            max_completion_length=options.max_new_tokens,
            temperature=1.0,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        language_model: Any = ours.module.policy.language_model  # type: ignore
        tokenizer = copy.deepcopy(language_model.tokenizer.tokenizer)
        tokenizer.padding_side = "left"
        base = load_base(LanguageModelConfig(name=options.model, dtype=options.dtype))
        self.trainer: Any = GRPOTrainer(
            model=base,
            peft_config=copy.deepcopy(language_model.model.peft_config["default"]) if options.lora_r else None,
            args=arguments,
            callbacks=[self.clock],
            reward_funcs=[vowels],  # pyright: ignore[reportArgumentType]
            train_dataset=Dataset.from_dict({"prompt": ours.prompts}),
            processing_class=tokenizer,
        )
        self.trainer.remove_callback(PrinterCallback)
        if options.lora_r:
            self.trainer.model.load_state_dict(language_model.model.state_dict())
        self.clock.metrics = self.trainer._metrics["train"]

    @property
    def response_tokens(self) -> float:
        """Return the mean length of the timed completions."""
        return sum(self.clock.lengths) / len(self.clock.lengths)

    def rate(self) -> float:
        """Return completions per second over several steps."""
        self.clock.times.clear()
        self.trainer.train()
        times, options = self.clock.times, self.options
        return options.steps * options.num_groups * options.group_size / (times[-1] - times[0])


def _clock_callback() -> Any:
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        """Records the time at the end of each step of TRL."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.lengths: list[float] = []
            self.metrics: dict[str, list[float]] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())
            self.lengths.append(self.metrics["completions/mean_length"][-1])

    return StepClock()


def compare(options: argparse.Namespace, tokens: int) -> Comparison:
    """Run the comparison at one prompt length."""
    ours = Ours(options, tokens)
    theirs = Theirs(options, ours)
    tolerance = 1e-5 if options.dtype == "float32" else None
    notes: dict[str, Any] = compare_first_batch(ours.module, theirs.trainer, tolerance)
    rates = alternate(ours.rate, theirs.rate, options.repeats)
    lengths = [len(ours.module.policy.encode(row.observation, ())) for row in ours.states.rows()]  # type: ignore
    notes |= {
        "prompt_tokens": sum(lengths) / len(lengths),
        "response_tokens_ours": ours.response_tokens,
        "response_tokens_theirs": theirs.response_tokens,
    }
    return Comparison(
        name=f"prompts of {round(notes['prompt_tokens'])} tokens",
        unit="completions",
        ours=rates[0],
        theirs=rates[1],
        notes=notes,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py grpo``."""
    parser.add_argument("--model", default="assets/tiny-lm")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lora_r", type=int, default=None, help="train adapters of this rank instead of all weights")
    parser.add_argument("--last_layers", type=int, default=None, help="give adapters to this many layers only")
    parser.add_argument("--prompt_tokens", type=int, nargs="+", default=[100, 30, 300])
    parser.add_argument("--num_groups", type=int, default=8, help="prompts per step")
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed in each repeat")
    parser.add_argument("--repeats", type=int, default=4)


def title(options: argparse.Namespace) -> str:
    """Return what is compared, for tables: model and adapters where they are not the default."""
    words = ["GRPO step against TRL"]
    if options.lora_r is not None:
        layers = "all layers" if options.last_layers is None else f"the last {options.last_layers} layers"
        words += [options.model, options.dtype, f"LoRA on {layers}"]
    return ", ".join(words)


def main(options: argparse.Namespace) -> None:
    """Run the comparison at every prompt length, and print and write its result."""
    quiet()
    names = ("model", "dtype", "lora_r", "last_layers", "num_groups", "group_size", "max_new_tokens", "steps")
    settings = {name: getattr(options, name) for name in names}
    document = {"bar": BAR, "title": title(options), "settings": settings | {"kl_coef": KL_COEF}}
    comparisons: list[Comparison] = []
    for tokens in options.prompt_tokens:
        comparison = compare(options, tokens)
        comparisons.append(comparison)
        notes = comparison.notes
        print(
            f"{comparison.name}: first loss {notes['loss_ours']:.7f} = {notes['loss_theirs']:.7f}, completions of "
            f"{notes['response_tokens_ours']:.1f} and {notes['response_tokens_theirs']:.1f} tokens",
            flush=True,
        )
        write(comparisons, options.json, **document)
        gc.collect()
    finish(comparisons, path=options.json, **document)
