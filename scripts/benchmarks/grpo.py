"""One GRPO step, rollout and update, against TRL's ``GRPOTrainer``.

Both have the same initial weights, prompts in groups of 8, KL term and reference, one optimizer step per rollout, and
float32 unless ``--dtype`` is given. With ``--lora_r`` both train the same adapters, in all layers or in the last ones.
TRL runs in its own ``train()`` with Hugging Face's ``generate``, without activation checkpointing, logging and saving.
lrl runs in Lightning's ``fit()``. Rates are measured from the end of the first step to the end of the last.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    trained,
    trainer_settings,
    trl_settings,
)
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor

from lrl.algorithms.grpo import GRPOModule, KLConfig
from lrl.api import train
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
from lrl.training.optimizer import OptimizerConfig
from lrl.types import PastTurn, SamplingConfig, TurnBatch

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
        """Return the template; responses end with the end token, so that neither library needs a stop string."""
        system = THINK.instruction if self.tokens < 100 else f"{self.codec.description} {THINK.instruction}"
        example = PastTurn(render_map(0, named_map("4x4")), THINK.render("DOWN", "I look around, then I decide."))
        examples = (example,) * max(0, round((self.tokens - 105) / 49))
        return PromptTemplate(response_format="direct", system=system, examples=examples)


def pay(text: str) -> float:
    """Return a reward that is computed quickly and differs within a group."""
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


class Ours:
    """Runs of lrl.

    Args:
        options: options of the command line.
        tokens: approximate number of tokens of a prompt.
        language_model: further settings of the language model.
    """

    def __init__(self, options: argparse.Namespace, tokens: int, **language_model: Any) -> None:
        self.options, self.states = options, States(options.num_groups, tokens)
        lora = None
        if options.lora_r is not None:
            lora = LoRAConfig(r=options.lora_r, alpha=2 * options.lora_r, last_layers=options.last_layers)
        policy = TextPolicy(
            LanguageModelConfig(name=options.model, dtype=options.dtype, lora=lora, **language_model),
            self.states.prompt(),
            SamplingConfig(max_new_tokens=options.max_new_tokens),
            max_prompt_tokens=2048,
        )
        policy.connect(self.states.codec)
        optimizer, kl = OptimizerConfig(lr=LR), KLConfig(coef=KL_COEF)
        self.module = GRPOModule(policy, optimizer, CLIP_RANGE, kl=kl, loss_normalisation="sequence")
        configure_on(options.device, self.module)
        self.response_tokens = 0.0
        self.update_seconds = list[float]()
        """Seconds of the updates that were timed, without the collections."""

    @property
    def prompts(self) -> list[str]:
        """Return the prompts as text."""
        policy: Any = self.module.policy
        ids = [policy.encode(row.observation, ()) for row in self.states.rows()]
        return [policy.language_model.tokenizer.tokenizer.decode(prompt) for prompt in ids]

    def rate(self) -> float:
        """Return completions per second over several steps."""
        begun, times, options = list[float](), list[float](), self.options
        clock = LambdaCallback(
            on_train_batch_start=lambda *_: begun.append(now()), on_train_epoch_end=lambda *_: times.append(now())
        )
        data = self.train(options.steps + 1, clock)
        self.response_tokens = data.clocks["tokens"] / data.clocks["episodes"]
        self.update_seconds += [end - start for start, end in zip(begun[1:], times[1:], strict=True)]
        return options.steps * options.num_groups * options.group_size / (times[-1] - times[0])

    def train(self, collections: int, callback: Callback) -> RolloutDataModule:
        """Train on a number of collections, and return their data."""
        options = self.options
        data = RolloutDataModule(
            PromptEnvs(self.states, [Vowels()]), num_groups=options.num_groups, group_size=options.group_size
        )
        settings = trainer_settings(options, MAX_GRAD_NORM)
        train(self.module, data, max_epochs=collections, callbacks=[callback], **settings)
        return data


class Theirs:
    """Runs of TRL."""

    def __init__(self, options: argparse.Namespace, ours: Ours) -> None:
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

        self.completions = options.steps * options.num_groups * options.group_size
        self.clock = TRLClock(lambda trainer: trainer._metrics["train"]["completions/mean_length"][-1])
        arguments = GRPOConfig(
            **trl_settings(options.steps, LR, MAX_GRAD_NORM, options.device),
            bf16=options.dtype == "bfloat16",
            activation_checkpointing=False,
            per_device_train_batch_size=options.num_groups * options.group_size,
            num_generations=options.group_size,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            num_iterations=1,
            beta=KL_COEF,
            use_bias_correction_kl=False,
            epsilon=CLIP_RANGE,
            loss_type="grpo",
            max_completion_length=options.max_new_tokens,
            temperature=1.0,
        )
        language_model: Any = ours.module.policy.language_model  # type: ignore
        tokenizer = copy.deepcopy(language_model.tokenizer.tokenizer)
        tokenizer.padding_side = "left"
        self.trainer: Any = GRPOTrainer(
            model=load_base(LanguageModelConfig(name=options.model, dtype=options.dtype)),
            peft_config=copy.deepcopy(language_model.model.peft_config["default"]) if options.lora_r else None,
            args=arguments,
            callbacks=[self.clock],
            reward_funcs=[vowels],  # pyright: ignore[reportArgumentType]
            train_dataset=Dataset.from_dict({"prompt": ours.prompts}),
            processing_class=tokenizer,
        )
        if options.lora_r:
            self.trainer.model.load_state_dict(language_model.model.state_dict())

    def rate(self) -> float:
        """Return completions per second over several steps."""
        return self.completions / self.clock.train(self.trainer)


# Checks on the first batch, before anything is timed.


def first_batch(trainer: Any) -> dict[str, Tensor]:
    """Return the batch that TRL samples for its first step, with its loss and gradients."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def as_turns(inputs: dict[str, Tensor]) -> TurnBatch:
    """Return TRL's batch in the layout of lrl: prompts padded on the right."""
    mask = inputs["completion_mask"].bool()
    order = torch.argsort(inputs["prompt_mask"], dim=1, descending=True, stable=True)
    ours = {
        "prompt_ids": inputs["prompt_ids"].gather(1, order),
        "prompt_mask": inputs["prompt_mask"].gather(1, order).bool(),
        "response_ids": inputs["completion_ids"] * mask,
    }
    nothing = torch.zeros(mask.shape, device=mask.device)
    advantages = inputs["advantages"][:, None] * mask
    return TurnBatch(inputs=ours, response_mask=mask, old_logprobs=nothing, advantages=advantages)


@contextmanager
def moved(*models: Any, size: float = 0.01) -> Iterator[None]:
    """Change the weights of both models temporarily, so that ratio and KL divergence are not trivial."""
    kept = [[weight.detach().clone() for weight in trained(model)] for model in models]
    with torch.no_grad():
        for model in models:
            device = next(model.parameters()).device
            generator = torch.Generator(device).manual_seed(0)
            for weight in trained(model):
                weight.add_(size * torch.randn(weight.shape, generator=generator, device=device))
    yield
    with torch.no_grad():
        for model, weights in zip(models, kept, strict=True):
            for weight, old in zip(trained(model), weights, strict=True):
                weight.copy_(old)


def first_rows(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the first rows of a batch of TRL."""
    total = len(inputs["prompt_ids"])
    return {
        name: value[:rows] if isinstance(value, Tensor) and value.ndim and len(value) == total else value
        for name, value in inputs.items()
    }


def compare_first_batch(module: GRPOModule, trainer: Any, tolerance: float | None = 1e-5) -> dict[str, float]:
    """Compare loss and gradient on TRL's first batch, with slightly changed weights.

    Args:
        module: algorithm of lrl.
        trainer: trainer of TRL with the same weights.
        tolerance: tolerance of the loss and the gradient. None in 16 bits, in which losses may differ by 1e-2, and
            gradients are compared on eight rows with the gradient of TRL in float32, see :func:`check_gradients`.

    Raises:
        AssertionError: If the losses or the gradients differ by more than the tolerance.
    """
    inputs = first_batch(trainer)
    if tolerance is None:
        inputs = first_rows(inputs, 8)
    batch = as_turns(inputs)
    with torch.no_grad():
        batch = batch.replace(old_logprobs=module.policy.evaluate(batch).logprobs)
    batch = batch.replace(ref_logprobs=module.policy.reference_logprobs(batch))
    inputs = inputs | {"old_per_token_logps": batch.old_logprobs}
    policy: Any = module.policy
    models = policy.language_model.model, trainer.model
    with moved(*models):
        losses: Any = module.training_step(batch), trainer.compute_loss(models[1], inputs)
        grads = [gradient(*pair) for pair in zip(losses, models, strict=True)]
        notes = {"loss_ours": losses[0].item(), "loss_theirs": losses[1].item()}
        notes["gradient_norm"] = grads[0].norm().item()
        near = 1e-2 if tolerance is None else tolerance
        torch.testing.assert_close(losses[0], losses[1], atol=near, rtol=near)
        if tolerance is not None:
            torch.testing.assert_close(grads[0], grads[1], atol=tolerance, rtol=10 * tolerance)
            return notes
        wide = copy.deepcopy(models[1]).float()
        exact = gradient(trainer.compute_loss(wide, inputs), wide)
    return notes | check_gradients(grads, exact)


def measure(options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Run the comparison at one prompt length."""
    ours = Ours(options, tokens)
    theirs = Theirs(options, ours)
    return timed(options, ours, theirs, compare_first_batch(ours.module, theirs.trainer, tolerance(options)))


def tolerance(options: argparse.Namespace) -> float | None:
    """Return the tolerance of :func:`compare_first_batch`."""
    return 1e-5 if options.dtype == "float32" else None


def timed(
    options: argparse.Namespace, ours: Ours, theirs: Theirs, notes: dict[str, Any], warm: bool = False
) -> dict[str, Any]:
    """Measure both implementations, and return a row of the table.

    Args:
        options: options of the command line.
        ours: runs of lrl.
        theirs: runs of TRL.
        notes: further entries of the row.
        warm: whether both need no run before the first measurement; the first step of a run is never timed.
    """
    lengths = [len(ours.module.policy.encode(row.observation, ())) for row in ours.states.rows()]  # type: ignore
    notes["prompt_tokens"] = sum(lengths) / len(lengths)
    name = f"prompts of {round(notes['prompt_tokens'])} tokens"
    row = compare(name, "completions", ours.rate, theirs.rate, options.repeats, warm, **notes)
    row["response_tokens_ours"] = ours.response_tokens
    row["response_tokens_theirs"] = sum(theirs.clock.counts) / len(theirs.clock.counts)
    print(
        f"{name}: first loss {row.get('loss_ours', nan):.7f} = {row.get('loss_theirs', nan):.7f}, completions of "
        f"{row['response_tokens_ours']:.1f} and {row['response_tokens_theirs']:.1f} tokens",
        flush=True,
    )
    return row


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
    add_device_arguments(parser)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare all prompt lengths, and yield a report after each of them."""
    title, rows = "GRPO step against TRL", list[dict[str, Any]]()
    if options.lora_r is not None:
        layers = "all layers" if options.last_layers is None else f"the last {options.last_layers} layers"
        title += f", {options.model}, {options.dtype}, LoRA on {layers}"
    for tokens in options.prompt_tokens:
        rows.append(measure(options, tokens))
        yield compared(title, BAR, rows, kl_coef=KL_COEF)
        gc.collect()  # frees the models before the next ones are loaded
        gc.collect()
