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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from benchmarks.timing import TRLClock, compare, compared, trl_settings
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lrl.algorithms.grpo import GRPOModule, KLConfig
from lrl.api import train
from lrl.codecs.codec import TextCodec
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.frozen_lake import named_map
from lrl.envs.prompt_env import PromptEnvs, RowSource
from lrl.lm.attention import SOUND
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.loading import load_base
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate, get_response_format
from lrl.rewards.reward import Reward, Row
from lrl.training.optimizer import OptimizerConfig
from lrl.types import PastTurn, SamplingConfig, TurnBatch

KL_COEF, CLIP_RANGE, LR, MAX_GRAD_NORM = 0.04, 0.2, 1e-6, 1.0
SETTINGS = {"accelerator": "cpu", "limit_val_batches": 0, "gradient_clip_val": MAX_GRAD_NORM}
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
    """Runs of lrl."""

    def __init__(self, options: argparse.Namespace, tokens: int) -> None:
        self.options, self.states = options, States(options.num_groups, tokens)
        lora = None
        if options.lora_r is not None:
            lora = LoRAConfig(r=options.lora_r, alpha=2 * options.lora_r, last_layers=options.last_layers)
        policy = TextPolicy(
            LanguageModelConfig(name=options.model, dtype=options.dtype, lora=lora),
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
        times, options = list[float](), self.options
        data = RolloutDataModule(
            PromptEnvs(self.states, [Vowels()]), num_groups=options.num_groups, group_size=options.group_size
        )
        clock = LambdaCallback(on_train_epoch_end=lambda *_: times.append(time.perf_counter()))
        train(self.module, data, max_epochs=options.steps + 1, callbacks=[clock], **SETTINGS)
        self.response_tokens = data.clocks["tokens"] / data.clocks["episodes"]
        return options.steps * options.num_groups * options.group_size / (times[-1] - times[0])


class Theirs:
    """Runs of TRL."""

    def __init__(self, options: argparse.Namespace, ours: Ours) -> None:
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

        self.completions = options.steps * options.num_groups * options.group_size
        self.clock = TRLClock(lambda trainer: trainer._metrics["train"]["completions/mean_length"][-1])
        arguments = GRPOConfig(
            **trl_settings(options.steps, LR, MAX_GRAD_NORM),
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

LENGTH = 0.1
"""Maximum additional distance from 1, compared with TRL, of the length of a gradient in 16 bits."""


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
    nothing = torch.zeros(mask.shape)
    advantages = inputs["advantages"][:, None] * mask
    return TurnBatch(inputs=ours, response_mask=mask, old_logprobs=nothing, advantages=advantages)


def trained(model: Any) -> list[Tensor]:
    """Return the trained weights: all weights, or the weights of adapters."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def gradient(loss: Tensor, model: Any) -> Tensor:
    """Return the gradient of a loss with respect to all trained weights, flat."""
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained(model))])


@contextmanager
def moved(*models: Any, size: float = 0.01) -> Iterator[None]:
    """Change the weights of both models temporarily, so that ratio and KL divergence are not trivial."""
    kept = [[weight.detach().clone() for weight in trained(model)] for model in models]
    with torch.no_grad():
        for model in models:
            generator = torch.Generator().manual_seed(0)
            for weight in trained(model):
                weight.add_(size * torch.randn(weight.shape, generator=generator))
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
            gradients are compared on eight rows with the gradient of TRL in float32: the relative error of lrl must be
            at most :data:`SOUND` times that of TRL, and its length along the gradient in float32 may differ from 1 by
            at most :data:`LENGTH` more than the length of TRL's gradient.

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
    errors = [float((grad.float() - exact).norm() / exact.norm()) for grad in grads]
    assert errors[0] <= SOUND * errors[1], f"the gradient of lrl is {errors[0]:.3f} from float32, TRL's {errors[1]:.3f}"
    lengths = [float(grad.float() @ exact / exact.square().sum()) for grad in grads]
    message = f"along the gradient in float32, lrl's has the length {lengths[0]:.3f}, TRL's {lengths[1]:.3f}"
    assert abs(lengths[0] - 1) <= abs(lengths[1] - 1) + LENGTH, message
    for side, error, length in zip(("ours", "theirs"), errors, lengths, strict=True):
        notes |= {f"gradient_error_{side}": error, f"gradient_length_{side}": length}
    return notes


def measure(options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Run the comparison at one prompt length."""
    ours = Ours(options, tokens)
    theirs = Theirs(options, ours)
    notes: dict[str, Any] = compare_first_batch(
        ours.module, theirs.trainer, 1e-5 if options.dtype == "float32" else None
    )
    lengths = [len(ours.module.policy.encode(row.observation, ())) for row in ours.states.rows()]  # type: ignore
    notes["prompt_tokens"] = sum(lengths) / len(lengths)
    name = f"prompts of {round(notes['prompt_tokens'])} tokens"
    row = compare(name, "completions", ours.rate, theirs.rate, options.repeats, **notes)
    row["response_tokens_ours"] = ours.response_tokens
    row["response_tokens_theirs"] = sum(theirs.clock.counts) / len(theirs.clock.counts)
    print(
        f"{name}: first loss {row['loss_ours']:.7f} = {row['loss_theirs']:.7f}, completions of "
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
