"""Loss, gradients and advantages of GRPO against TRL's, on the same numbers."""

import itertools
import math

import pytest
import torch
from tiny_runs import from_settings

from lrl.algorithms.grpo import GRPOModule
from lrl.functional.groups import group_advantages
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig, TurnBatch

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

MAX_NEW_TOKENS = 9
LOSS_TYPES = {"sequence": ["grpo"], "token": ["bnpo", "dapo"], "constant": ["dr_grpo"]}
PAIRS = [(ours, theirs) for ours, names in LOSS_TYPES.items() for theirs in names]


def reward(completions, **_):
    """Return lengths as rewards; the tests replace them by their own."""
    return [float(len(completion)) for completion in completions]


@pytest.fixture(scope="module", params=["float32", "float64"])
def trainer(request, tiny_model, tmp_path_factory):
    """TRL's own trainer, on the CPU; its KL term is the paper's, not multiplied by the ratio."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=10,
        num_generations=2,
        steps_per_generation=1,
        max_completion_length=MAX_NEW_TOKENS,
        disable_tqdm=True,
        use_bias_correction_kl=False,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, request.param))
    rows = Dataset.from_dict({"prompt": ["w1 w2", "w3"] * 5})
    made = GRPOTrainer(model=model, reward_funcs=reward, args=arguments, train_dataset=rows)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def grpo(folder, dtype, share_prompts=True, temperature=1.0, **changes):
    """Our module, with a tiny model and no trainer."""
    model = LanguageModelConfig(name=folder, dtype=dtype, share_prompts=share_prompts)
    sampling = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
    module = from_settings(GRPOModule, TextPolicy(model, PromptTemplate(), sampling), **changes)
    module.configure_model()
    return module


@torch.no_grad()
def made_up(module, seed=0, reference=True):
    """Ten turns over three prompts; ratios on both sides of every clip, and a reference that differs."""
    generator = torch.Generator().manual_seed(seed)
    prompt_of = torch.tensor([0, 1, 0, 2, 0, 1, 0, 2, 2, 1])
    lengths, sizes = torch.tensor([7, 3, 11])[prompt_of], torch.tensor([4, 1, 3, 9, 2, 5, 8, 6, 7, 9])
    prompt_mask, mask = torch.arange(11)[None] < lengths[:, None], torch.arange(9)[None] < sizes[:, None]
    prompts = torch.randint(1, 48, (3, 11), generator=generator)[prompt_of]
    inputs = {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "response_ids": torch.randint(1, 48, (10, 9), generator=generator) * mask,
    }
    batch = TurnBatch(inputs=inputs, response_mask=mask, old_logprobs=mask.float(), advantages=mask.float())
    now = module.policy.evaluate(batch).logprobs
    noise = torch.randn(3, 10, 9, generator=generator, dtype=now.dtype)
    advantages = (0.5 + torch.randn(10, 1, generator=generator, dtype=now.dtype)) * mask
    references = (now + 0.3 * noise[1]) * mask if reference else None
    return batch.replace(old_logprobs=(now + 0.3 * noise[0]) * mask, advantages=advantages, ref_logprobs=references)


def theirs_of(batch):
    """Return a batch in TRL's format: prompts padded on the left, one advantage per turn."""
    prompt_ids, prompt_mask = batch.inputs["prompt_ids"], batch.inputs["prompt_mask"]
    order = torch.argsort(prompt_mask.long(), dim=1, stable=True)
    inputs = {
        "prompt_ids": prompt_ids.gather(1, order),
        "prompt_mask": prompt_mask.gather(1, order).long(),
        "completion_ids": batch.inputs["response_ids"],
        "completion_mask": batch.response_mask.long(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.old_logprobs,
        "num_items_in_batch": batch.response_mask.sum().float(),
    }
    return inputs if batch.ref_logprobs is None else inputs | {"ref_per_token_logps": batch.ref_logprobs}


def gradients(loss, model):
    """Return all gradients as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def set_theirs(trainer, **changes):
    """Change what the loss reads of TRL's settings."""
    for name, value in changes.items():
        assert hasattr(trainer, name)
        setattr(trainer, name, value)


def assert_equal(module, trainer, batch):
    """Loss and gradients agree to 1e-5."""
    ours, theirs = module.training_step(batch), trainer._compute_loss(trainer.model, theirs_of(batch))
    assert abs(ours.item()) > 1e-3
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=1e-5, rtol=1e-5)
    own, others = gradients(ours, module.policy.language_model.model), gradients(theirs, trainer.model)
    assert own.norm() > 1e-2
    torch.testing.assert_close(own, others, atol=1e-5, rtol=1e-5)


def dtype_of(trainer):
    return str(trainer.model.dtype).removeprefix("torch.")


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(("kl_coef", "clip_high"), list(itertools.product([0.0, 0.2], [None, 0.4])))
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_loss_and_gradients_are_those_of_trl(trainer, tiny_model, ours, theirs, kl_coef, clip_high, share_prompts):
    module = grpo(
        tiny_model,
        dtype_of(trainer),
        share_prompts,
        loss_normalisation=ours,
        kl={"coef": kl_coef},
        clip_range=0.2,
        clip_range_high=clip_high,
    )
    set_theirs(trainer, loss_type=theirs, beta=kl_coef, epsilon_low=0.2, epsilon_high=clip_high or 0.2, temperature=1.0)
    assert_equal(module, trainer, made_up(module, reference=kl_coef > 0))


def test_the_clip_matters_in_these_tests(trainer, tiny_model):
    module = grpo(tiny_model, dtype_of(trainer))
    batch = made_up(module)
    ratio = (module.policy.evaluate(batch).logprobs - batch.old_logprobs).exp()[batch.response_mask]
    for low, high in [(0, 0.8), (0.8, 1.2), (1.2, 1.4), (1.4, math.inf)]:
        assert int(((ratio > low) & (ratio < high)).sum()) >= 3


def test_the_entropy_bonus_is_trls_under_token_normalisation(trainer, tiny_model):
    """TRL averages the bonus over all tokens for every loss; lrl normalises it like the loss."""
    module = grpo(tiny_model, dtype_of(trainer), loss_normalisation="token", ent_coef=0.1)
    set_theirs(
        trainer,
        loss_type="bnpo",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        entropy_coef=0.1,
        _entropy_bonus_enabled=True,
    )
    try:
        assert_equal(module, trainer, made_up(module, reference=False))
    finally:
        set_theirs(trainer, entropy_coef=0.0, _entropy_bonus_enabled=False)


@pytest.mark.parametrize(("ours", "theirs"), [("group_std", "group"), ("batch_std", "batch"), ("none", "none")])
def test_group_advantages_are_those_of_trl(trainer, monkeypatch, ours, theirs):
    """TRL computes them behind the rollout, so it is given one: the rewards are made up."""
    rewards = torch.randn(10, generator=torch.Generator().manual_seed(1))
    rewards[4:6] = 0.7  # a group that agrees
    rows = [{"prompt": f"w{n // 2} w1"} for n in range(10)]
    monkeypatch.setattr(trainer, "scale_rewards", theirs)
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *_: rewards[:, None])
    monkeypatch.setattr(trainer, "beta", 0.0)
    given = trainer._generate_and_score_completions(rows)["advantages"]
    own = group_advantages(rewards, torch.arange(10) // 2, ours)
    torch.testing.assert_close(own, given, atol=1e-5, rtol=1e-5)
    assert own[4] == own[5] == 0
