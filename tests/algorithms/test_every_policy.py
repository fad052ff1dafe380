"""Every algorithm that learns from rewards trains every policy, as the matrix of the README says."""

import re
from pathlib import Path

import lightning
import pytest
import torch

import lrl
from lrl.codecs.numbers import NumberFormat

MODEL = lrl.LanguageModelConfig(name="assets/tiny-lm", lora=lrl.LoRAConfig(r=2, alpha=4))
PROMPT, CRITIC = lrl.PromptTemplate(response_format="direct"), lrl.ValueHeadConfig()
POLICIES = {
    "TextPolicy": lambda: lrl.TextPolicy(MODEL, PROMPT, lrl.SamplingConfig(max_new_tokens=2), value_head=CRITIC),
    "ScoringPolicy": lambda: lrl.ScoringPolicy(MODEL, PROMPT, value_head=CRITIC),
    "HeadPolicy": lambda: lrl.HeadPolicy(lrl.LanguageModelConfig(name="assets/tiny-lm"), freeze_trunk=True),
    "MLPPolicy": lambda: lrl.MLPPolicy(hidden_sizes=[8]),
}
GROUPS = {"num_groups": 2, "group_size": 3}
ALGORITHMS = {
    "GRPO": (lrl.GRPOModule, GROUPS),
    "PPO": (lrl.PPOValueHeadModule, {"num_envs": 2, "num_steps": 3}),
    "REINFORCE++": (lrl.REINFORCEPlusPlusModule, GROUPS),
    "TRPO": (lrl.TRPOModule, {"num_envs": 2, "num_steps": 3}),
}


def test_the_matrix_of_the_readme_names_these_algorithms_and_policies():
    text = (
        Path("README.md").read_text(encoding="utf-8").partition("## Algorithms and policies")[2].partition("\n## ")[0]
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert re.findall(r"`(\w+)`", rows[0]) == list(POLICIES)
    assert [re.findall(r"\w[\w+]*", row)[0] for row in rows[2:]] == ["SFT", *ALGORITHMS]


def trainable(module):
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


class Start(lightning.Callback):
    """Keeps the weights at the start of training."""

    def on_train_start(self, trainer, pl_module):
        self.weights = {name: value.detach().clone() for name, value in trainable(pl_module).items()}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_trains_a_policy(algorithm, policy):
    torch.manual_seed(0)
    module_class, sizes = ALGORITHMS[algorithm]
    numbers = None if policy == "MLPPolicy" else NumberFormat(kind="integers")
    data = lrl.RolloutDataModule(lrl.GymnasiumEnvs("CartPole-v1", numbers=numbers), **sizes)
    module = module_class(POLICIES[policy]())
    start = Start()
    lrl.train(module, data, max_epochs=2, limit_val_batches=0, accelerator="cpu", callbacks=[start])
    assert start.weights and any(
        not torch.equal(value, start.weights[name]) for name, value in trainable(module).items()
    )
