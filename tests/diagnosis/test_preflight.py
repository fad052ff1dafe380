"""Findings of the preflight checks for healthy configurations, and for code that has a mistake."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_runs import demonstrations, grpo, make_trainer, network, ppo, rollout_data, save_tiny_model, sft

import lrl.algorithms.grpo
import lrl.algorithms.ppo
import lrl.cli.preflight_run
import lrl.policies.text
import lrl.training.collect
from lrl.cli.preflight import main
from lrl.cli.preflight_run import Finished, Preflight
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.diagnosis.preflight import Played, Update, baselines, groups, prompts, repeated, responses, update
from lrl.envs.native import NativeEnv
from lrl.policies.mlp import MLPPolicy
from lrl.policies.text import TextPolicy
from lrl.rewards.expert_q import QGapReward
from lrl.training.gradient_module import GradientModule
from lrl.training.optimizer import OptimizerConfig
from lrl.training.value_fit import ValueFit

RUNS = {
    "prompts": lambda folder: grpo(folder, kl={"coef": 0.1}, ent_coef=0.0),
    "episodes": lambda folder: grpo(folder, kl={"coef": 0.0}),
    "continuing": lambda folder: ppo(folder, kl={"coef": 0.0, "target": None}, credit={"kind": "turn"}),
    "network": network,
    "fitted": lambda folder: network(folder, critic={"fit": ValueFit()}),
    "demonstrations": sft,
}
SIZES = {"network": {"num_steps": 24}, "fitted": {"num_steps": 24}, "continuing": {"num_steps": 8}}

TASKS = {"fitted": "network"}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("preflight") / "model")


@pytest.fixture(autouse=True)
def fewer_episodes(monkeypatch):
    monkeypatch.setattr(lrl.cli.preflight_run, "_EPISODES", 12)


def causes(root, folder, kind):
    """Run the checks on a tiny task, and return the mistakes that are found."""
    preflight = Preflight()
    sizes = {"num_minibatches": 1} | SIZES.get(kind, {})
    data = demonstrations() if kind == "demonstrations" else rollout_data(TASKS.get(kind, kind), **sizes)
    with pytest.raises(Finished):
        make_trainer(root, preflight).fit(RUNS[kind](folder), data)
    return [one.cause for one in preflight.report.findings if one.severity == "error"]


@pytest.mark.parametrize("kind", list(RUNS))
def test_a_healthy_configuration_has_no_mistakes(kind, tiny_folder, tmp_path):
    assert causes(tmp_path, tiny_folder, kind) == []


def of_rollout(change):
    """Change what a collection records."""
    return (lrl.training.collect, "stack_steps", lambda old: lambda *args, **kw: change(old(*args, **kw)))


def of_optimiser(create):
    """Create another optimiser."""
    return (OptimizerConfig, "make", lambda old: lambda config, groups, steps, fused: create(groups, config.lr))


def of_seeds(change):
    """Reset training environments with other seeds."""

    def changed(old):
        def seeds(purpose, *counters):
            return change(old(purpose, *counters)) if purpose == "reset" else old(purpose, *counters)

        return seeds

    return (lrl.training.collect, "seeds", changed)


def without_schedule(groups, lr):
    optimizer = torch.optim.AdamW(groups, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def renewed(old):
    """Replace the log-probabilities of sampling by those of the current policy after the first minibatch."""

    def minibatch(self, index):
        batch = old(self, index)
        with torch.no_grad():
            logprobs = self.trainer.lightning_module.policy.evaluate(batch).logprobs
        return batch.replace(old_logprobs=logprobs) if index else batch

    return minibatch


def detached(old):
    def evaluate(self, *args):
        weight = next(weight for weight in self.parameters() if weight.requires_grad)
        evaluation = old(self, *args)
        return replace(evaluation, logprobs=evaluation.logprobs.detach() + 0 * weight.sum())

    return evaluate


def with_other_action(old):
    def act(self, *args):
        decisions = old(self, *args)
        return replace(decisions, inputs=decisions.inputs | {"action": decisions.inputs["action"].roll(1, 0)})

    return act


def without_end(old):
    return lambda self, responses: [ids[:-1] for ids in old(self, responses)]


def equal_bits(old):
    return lambda keys, count: old(keys, count)[:1].expand(len(keys.env), -1).clone()


def negated(old):
    return lambda *args, **kw: -old(*args, **kw)


def over_later_tokens(old):
    """Average the loss over the tokens after the first in training steps, which give the sizes by keyword."""

    def reduced(self, tokens, mask, *rest, **sizes):
        later = mask & (torch.arange(mask.shape[1]) > 0)
        return old(self, tokens, later if sizes else mask, *rest, **sizes)

    return reduced


MISTAKES = {
    "reward has the wrong sign": ("prompts", (QGapReward, "of_actions", negated)),
    "environment is not deterministic": (
        "network",
        (NativeEnv, "reset", lambda old: lambda self, seed=None, options=None: old(self, options=options)),
    ),
    "rewards are not those of the environment": (
        "prompts",
        of_rollout(lambda r: r.replace(rewards=r.rewards.roll(1, 1))),
    ),
    "truncation treated as termination": (
        "network",
        of_rollout(lambda r: r.replace(terminated=r.terminated | r.truncated, truncated=r.truncated & False)),
    ),
    "prompts do not belong to their observations": (
        "continuing",
        (TextPolicy, "act", lambda old: lambda self, seen, *rest: old(self, [*seen[1:], seen[0]], *rest)),
    ),
    "sampling and training disagree": ("network", (MLPPolicy, "act", with_other_action)),
    "environments share random numbers": ("prompts", (lrl.policies.text, "token_bits", equal_bits)),
    "held-out episodes are used in training": ("network", of_seeds(lambda seeds: np.arange(len(seeds)) + 10_000)),
    "episodes of a group start from different states": (
        "episodes",
        of_seeds(lambda seeds: seeds + np.arange(len(seeds))),
    ),
    "update has the wrong sign": (
        "prompts",
        of_optimiser(lambda groups, lr: torch.optim.AdamW(groups, lr=lr, maximize=True)),
    ),
    "learning rate is 0": ("network", of_optimiser(without_schedule)),
    "old log-probabilities are not those of sampling": ("network", (RolloutDataModule, "minibatch", renewed)),
    "reference moves with the policy": (
        "prompts",
        (TextPolicy, "reference_logprobs", lambda old: lambda self, batch: self.evaluate(batch).logprobs.detach()),
    ),
    "weights without gradient": ("network", (MLPPolicy, "evaluate", detached)),
    "entropy bonus has the wrong sign": (
        "continuing",
        (
            lrl.algorithms.ppo.PPOValueHeadModule,
            "loss",
            lambda old: lambda self, batch, policy: old(self, batch, replace(policy, entropy=-policy.entropy)),
        ),
    ),
    "ratios are not clipped": (
        "network",
        (lrl.algorithms.ppo, "clipped_surrogate", lambda old: lambda ratio, advantages, *clip: ratio * advantages),
    ),
    "end token not trained": ("demonstrations", (TextPolicy, "encode_responses", without_end)),
    "sampled tokens not trained": ("continuing", (GradientModule, "reduced", over_later_tokens)),
    "gradients have the wrong size": (
        "demonstrations",
        (GradientModule, "backward", lambda old: lambda self, loss, *args, **kw: old(self, 3 * loss, *args, **kw)),
    ),
}


@pytest.mark.parametrize("cause", list(MISTAKES))
def test_a_mistake_in_the_code_is_found(cause, tiny_folder, tmp_path, monkeypatch):
    kind, (place, name, change) = MISTAKES[cause]
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    assert cause in causes(tmp_path, tiny_folder, kind)


def played(*rewards, cut=False):
    """Return episodes of one turn with these rewards, each played eight times."""
    values = np.tile(np.array(rewards, dtype=float), 8)[None]
    return Played(rewards=values, active=np.ones_like(values, dtype=bool), states=np.zeros_like(values), cut=cut)


@pytest.mark.parametrize(
    ("actors", "cause"),
    [
        ({"random": played(0, 1), "expert": played(1, 1), "unreadable": played(0, 0)}, None),
        ({"random": played(-3, -5), "constant 'left'": played(0, 0), "unreadable": played(-0.5, -0.5)}, None),
        (
            {"random": played(-3, -5), "constant 'left'": played(-4, -4), "unreadable": played(-0.5, -0.5)},
            "a wrong answer is rewarded",
        ),
        ({"random": played(0, 0), "expert": played(0, 0)}, "constant reward"),
        ({"random": played(1, 0), "expert": played(-1, -1)}, "reward has the wrong sign"),
        ({"random": played(1, 0), "expert": played(1, 0)}, "reward does not separate right from wrong actions"),
        ({"random": played(0, 1), "expert": played(1, 1), "constant 'up'": played(2, 2)}, "a wrong answer is rewarded"),
        ({"random": played(0, 1), "expert": played(1, 1), "unreadable": played(1, 1)}, "a wrong answer is rewarded"),
    ],
)
def test_rewards_of_actors_are_compared(actors, cause):
    assert [finding.cause for finding in baselines(actors)] == [cause] * (cause is not None)


ONES = np.ones((2, 2))
STEP = Update(mask=ONES > 0, advantages=ONES, before=-ONES, after=-0.9 * ONES, sampled=-ONES, moved=0.1)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        ({"left_out": ["policy.head"]}, "weights are missing in the optimiser"),
        ({"frozen_moved": ["policy.base"]}, "frozen weights change"),
        ({"moved": 0.0, "after": -ONES}, "weights are not trained"),
        ({"moved": 0.0, "after": -ONES, "trust_region": True}, None),
        ({"sampled": -2 * ONES}, "sampling and training disagree"),
        ({"critic": (ONES, 2 * ONES, 0 * ONES)}, "value loss has the wrong sign"),
    ],
)
def test_what_an_update_changes_is_checked(changes, cause):
    assert [finding.cause for finding in update(replace(STEP, **changes))] == [cause] * (cause is not None)


def test_problems_of_a_collection_are_warnings():
    found = [
        *groups(np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1])),
        *responses(np.zeros(100, dtype=bool), ["I will go"] * 100, np.full(100, 8), limit=8),
        *prompts(np.array([True, False]), np.zeros(2, dtype=bool), limit=64),
    ]
    assert {finding.severity for finding in found} == {"warning"}
    assert [finding.cause for finding in found] == [
        "groups are dead",
        "hardly any response contains a legal action",
        "prompts are cut",
    ]
    assert "'I will go', and 100%" in found[1].evidence


def test_episodes_that_were_cut_after_few_turns_may_have_equal_returns():
    short, long = played(1, 2, cut=True), played(1, 2)
    longer = replace(long, rewards=np.vstack([long.rewards] * 3), cut=True)
    assert list(repeated(short, longer)) == []
    assert list(baselines({"random": short, "expert": longer})) == []


def test_the_command_writes_no_files_and_ends_with_status_1_after_a_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lrl.algorithms.ppo, "value_loss", negated(lrl.algorithms.ppo.value_loss))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main("lrl preflight", ["--config", "cartpole/ppo_mlp.yaml", "--trainer.accelerator", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 6 + ["error", "error"]
    assert lines[6].startswith("error    loss          value loss has the wrong sign: ")
    assert lines[7].endswith("update        value loss has the wrong sign: see above")
    assert lines[-1].startswith("errors: 1, warnings: 0, in ")
    assert (ended.value.code, list(tmp_path.iterdir())) == (1, [])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--config", "cartpole/search.yaml"], "model is a PromptedSearchModule"),
        (["--config", "cartpole/ppo_mlp.yaml", "--ckpt_path", "x"], "ckpt_path is 'x'; it must be null"),
        (["--config", "cartpole/ppo_mlp.yaml", "--resume", "x"], "resume is 'x'; it must be left out"),
    ],
)
def test_what_cannot_be_checked_is_an_error_of_one_sentence(options, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main("lrl preflight", options)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"lrl preflight: {error}")


def test_successful_episodes_must_have_the_larger_returns():
    success, rewards = np.arange(20) % 2 == 0, np.where(np.arange(20) % 2 == 0, -1.0, 0.5)[None]
    ones = np.ones((1, 20), dtype=bool)
    played = Played(rewards=rewards, active=ones, states=ones.astype(int), cut=False, success=success)
    assert [found.cause for found in baselines({"random": played})] == ["reward has the wrong sign"]
    right = Played(rewards=-rewards, active=ones, states=ones.astype(int), cut=False, success=success)
    assert not list(baselines({"random": right}))


def test_a_step_that_is_too_large_is_a_warning():
    before = np.full((50, 1), -1.0)
    advantages = np.where(np.arange(50) % 2, 1.0, -1.0)[:, None]
    fields = {"mask": np.ones((50, 1), dtype=bool), "advantages": advantages, "before": before, "sampled": before}
    found = list(update(Update(**fields, after=before - 2 + advantages, moved=1.0)))
    assert [(one.cause, one.severity) for one in found] == [("learning rate too high", "warning")]
    assert not list(update(Update(**fields, after=before + 0.01 * advantages, moved=1.0)))
