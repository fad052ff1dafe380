"""Supervised fine-tuning against TRL's ``SFTTrainer``, on demonstrations of mixed lengths.

Both train on the same prompts and responses, with the same number per optimizer step, in float32 unless ``--dtype`` is
given; tokens without padding are counted. TRL has its default settings, apart from bfloat16 (slow on most CPUs),
logging and saving, with activation checkpointing, which is a default, and without. Packed rows are compared with
packed rows of the same width.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import numpy as np
import torch
from benchmarks.timing import (
    TRLClock,
    add_device_arguments,
    check_gradients,
    compare,
    compared,
    configure_on,
    gradient,
    now,
    trainer_settings,
    trl_settings,
)
from lightning.pytorch.callbacks import LambdaCallback

from lrl.algorithms.sft import SFTModule
from lrl.api import train
from lrl.codecs.codec import TextCodec
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.data.demonstration_tokens import collate_demonstrations
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.sources import Demonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.policies.policy import Policy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate, get_response_format
from lrl.training.optimizer import OptimizerConfig
from lrl.types import Demonstration, SamplingConfig, TurnBatch

LR, MAX_GRAD_NORM = 1e-6, 1.0
THINK = get_response_format("think_answer")


class Lakes(Demonstrations):
    """Demonstrations on maps of 2x2 to 10x10 cells, whose observations differ in length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def load(self, codec: TextCodec, policy: Policy) -> Sequence[Demonstration]:
        """Return random demonstrations, which are the same in each call."""
        rng = np.random.default_rng(0)
        return [self._turn(rng, codec) for _ in range(self.count)]

    def _turn(self, rng: np.random.Generator, codec: TextCodec) -> Demonstration:
        size = int(rng.integers(2, 11))
        cells = ["".join(rng.choice(["F", "F", "F", "H"], size)) for _ in range(size)]
        text, action = render_map(int(rng.integers(size * size)), cells), codec.action_to_text(int(rng.integers(4)))
        return Demonstration(text, THINK.render(action, f"I see {text.splitlines()[0]}, I choose"))


class Ours:
    """Runs of lrl; without ``pack_tokens``, rows are sorted by length and padded."""

    def __init__(self, options: argparse.Namespace, batch_size: int, pack_tokens: int | None) -> None:
        self.options, self.batch_size = options, batch_size
        codec = FrozenLakeCodec()
        prompt = PromptTemplate(response_format="direct", system=f"{codec.description} {THINK.instruction}")
        lora = None if options.lora_r is None else LoRAConfig(r=options.lora_r, alpha=2 * options.lora_r)
        language_model = LanguageModelConfig(name=options.model, dtype=options.dtype, lora=lora)
        self.policy = TextPolicy(language_model, prompt, SamplingConfig(), pack_tokens=pack_tokens)
        self.policy.connect(codec)
        self.module = SFTModule(self.policy, OptimizerConfig(lr=LR))
        configure_on(options.device, self.module)
        self.turns = Lakes(options.demonstrations).load(codec, self.policy)

    def rows(self) -> list[dict[str, str]]:
        """Return the demonstrations as a data set of TRL."""
        decode = self.policy.language_model.tokenizer.tokenizer.decode
        prompts = [decode(self.policy.encode(turn.observation, ())) for turn in self.turns]
        return [{"prompt": p, "completion": turn.response} for p, turn in zip(prompts, self.turns, strict=True)]

    def batch(self, count: int) -> TurnBatch:
        """Return the first demonstrations."""
        turns = self.turns[:count]
        prompts = [self.policy.encode(turn.observation, ()) for turn in turns]
        batch = collate_demonstrations(prompts, [self.policy.encode_response(turn.response) for turn in turns])
        return batch.map(lambda tensor: tensor.to(self.options.device))

    def rate(self) -> float:
        """Return tokens per second over several steps, without the first one."""
        times, tokens = list[float](), list[int]()

        def record(trainer: Any, module: Any, outputs: Any, batch: TurnBatch, index: int) -> None:
            times.append(now())
            tokens.append(int(batch.inputs["prompt_mask"].sum() + batch.response_mask.sum()))

        data = DemonstrationsDataModule(
            Lakes(self.options.demonstrations), GymnasiumEnvs("FrozenLake-v1"), batch_size=self.batch_size
        )
        clock, steps = LambdaCallback(on_train_batch_end=record), self.options.steps + 1
        settings = trainer_settings(self.options, MAX_GRAD_NORM)
        train(self.module, data, max_epochs=-1, max_steps=steps, callbacks=[clock], **settings)
        return sum(tokens[1:]) / (times[-1] - times[0])


class Theirs:
    """Runs of TRL."""

    def __init__(self, options: argparse.Namespace, ours: Ours, **changes: Any) -> None:
        from datasets import Dataset, disable_progress_bars  # pyright: ignore[reportMissingImports]
        from transformers import AutoTokenizer
        from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

        disable_progress_bars()
        settings = trl_settings(options.steps, LR, MAX_GRAD_NORM, options.device)
        language_model: Any = ours.policy.language_model
        peft_config = copy.deepcopy(language_model.model.peft_config["default"]) if options.lora_r else None
        half = options.dtype == "bfloat16"
        self.clock = TRLClock(lambda trainer: float(trainer._total_train_tokens))
        self.trainer: Any = SFTTrainer(
            model=options.model,
            args=SFTConfig(**settings, bf16=half, model_init_kwargs={"dtype": options.dtype}, **changes),
            peft_config=peft_config,
            train_dataset=Dataset.from_list(ours.rows()),
            callbacks=[self.clock],
            processing_class=AutoTokenizer.from_pretrained(options.model),
        )
        if options.lora_r:
            self.trainer.model.load_state_dict(language_model.model.state_dict())

    def rate(self) -> float:
        """Return tokens per second over several steps."""
        seconds = self.clock.train(self.trainer)
        return (self.clock.counts[-1] - self.clock.counts[0]) / seconds


def compare_first_batch(ours: Ours, theirs: Theirs, count: int) -> dict[str, Any]:
    """Compare loss and gradient on the first demonstrations; in 16 bits with the gradient of TRL in float32.

    Raises:
        AssertionError: If the losses or the gradients differ.
    """
    batch, trainer = ours.batch(count), theirs.trainer
    trainer.model.train()
    collated = trainer.data_collator([trainer.train_dataset[row] for row in range(count)])
    their_batch = {name: value.to(ours.options.device) for name, value in collated.items()}
    losses = ours.policy.evaluate(batch).logprobs, trainer.compute_loss(trainer.model, their_batch)
    own = -losses[0].sum() / batch.response_mask.sum()
    models = ours.policy.language_model.model, trainer.model
    grads = [gradient(*pair) for pair in zip((own, losses[1]), models, strict=True)]
    notes = {"loss_ours": own.item(), "loss_theirs": losses[1].item(), "gradient_norm": grads[0].norm().item()}
    if ours.options.dtype != "float32":
        torch.testing.assert_close(own.float(), losses[1].float(), atol=1e-2, rtol=1e-2)
        wide = copy.deepcopy(models[1]).float()
        return notes | check_gradients(grads, gradient(trainer.compute_loss(wide, their_batch), wide))
    torch.testing.assert_close(own, losses[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)
    return notes


def padded(options: argparse.Namespace, checkpointing: bool, check: bool = True) -> dict[str, Any]:
    """Compare training with one optimizer step per ``batch_size`` demonstrations.

    Args:
        options: options of the command line.
        checkpointing: whether TRL recomputes activations in the backward pass.
        check: whether loss and gradient are compared first.
    """
    ours = Ours(options, options.batch_size, None)
    changes = {} if checkpointing else {"activation_checkpointing": False}
    theirs = Theirs(options, ours, per_device_train_batch_size=options.batch_size, **changes)
    notes = compare_first_batch(ours, theirs, options.batch_size) if check else {}
    print(f"first loss {notes.get('loss_ours', nan):.7f} = {notes.get('loss_theirs', nan):.7f}")
    name = "TRL's defaults" if checkpointing else "without activation checkpointing"
    return compare(name, "tokens", ours.rate, theirs.rate, options.repeats, **notes)


def packed(options: argparse.Namespace) -> dict[str, Any]:
    """Compare training on rows of ``pack_tokens``, with about as many demonstrations per step."""
    ours = Ours(options, 1, options.pack_tokens)
    lengths = ours.batch(len(ours.turns))
    mean = float(lengths.inputs["prompt_mask"].sum() + lengths.response_mask.sum()) / len(ours.turns)
    ours.batch_size = round(options.pack_rows * options.pack_tokens / mean)
    theirs = Theirs(
        options,
        ours,
        per_device_train_batch_size=options.pack_rows,
        packing=True,
        max_length=options.pack_tokens,
        activation_checkpointing=False,
    )
    return compare("packed", "tokens", ours.rate, theirs.rate, options.repeats, tokens_mean=mean)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py sft``."""
    parser.add_argument("--model", default="assets/tiny-lm")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lora_r", type=int, default=None, help="train adapters of this rank instead of all weights")
    parser.add_argument("--demonstrations", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=8, help="demonstrations per step; 8 is TRL's default")
    parser.add_argument("--pack_tokens", type=int, default=512)
    parser.add_argument("--pack_rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    add_device_arguments(parser)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare with TRL's defaults, without activation checkpointing, and packed."""
    comparisons = [padded(options, True), padded(options, False), packed(options)]
    yield compared("SFT against TRL", 1.5, comparisons, dtype=options.dtype)
