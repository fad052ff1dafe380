"""Findings of the diagnosis in healthy runs, and in runs whose code has a mistake."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from tiny_runs import grpo, make_trainer, network, ppo, rollout_data, save_tiny_model, text_policy

import lrl.algorithms.grpo
import lrl.algorithms.ppo
import lrl.functional.advantages
import lrl.training.collect
import lrl.training.diagnosis
import lrl.training.gradient_module
import lrl.training.optimizer
from lrl.algorithms.grpo import GRPOModule
from lrl.algorithms.trpo import TRPOModule
from lrl.codecs.numbers import BinCodec, NumberFormat
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.diagnosis.credit import _distance
from lrl.diagnosis.metrics import diagnose, diagnose_metrics
from lrl.diagnosis.sample import Sample, read_samples
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.native import NativeEnv
from lrl.functional.distributions import Categorical
from lrl.lm.decoding import DecodeLoop
from lrl.lm.heads import ValueHead
from lrl.lm.model import LanguageModel
from lrl.policies.mlp import MLPPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.training.collect import CollectionPlan
from lrl.training.diagnosis import Diagnosis
from lrl.training.gradient_module import GradientModule
from lrl.training.optimizer import OptimizerConfig

RUNS = {
    "prompts": lambda folder: grpo(folder, kl={"coef": 0.1}, ent_coef=0.0),
    "episodes": lambda folder: grpo(folder, kl={"coef": 0.0}, optimizer={"lr": 1e-3}),
    "continuing": lambda folder: ppo(folder, kl={"coef": 0.0, "target": None}, credit={"kind": "turn"}),
    "network": network,
    "limited": lambda folder: network(folder, target_kl=1e-4),
    "history": lambda folder: ppo(folder, history=3, credit={"kind": "turn"}),
    "described": lambda folder: grpo(folder, model={"system": "RIGHT user DOWN"}),
    "numbers": lambda folder: ppo(folder, credit={"kind": "turn"}),
}
SETTINGS = {"history": {"num_envs": 1, "num_steps": 16}}
TASKS = {"limited": "network", "history": "continuing", "described": "prompts"}
NESTED = {kind: {"kind": kind, "normalise": kind != "nested"} for kind in ("nested", "token")}


def data_of(kind):
    if kind == "numbers":
        env = GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(kind="integers"), max_invalid=3, max_episode_steps=6)
        return RolloutDataModule(env, num_envs=12, num_steps=4, num_epochs=2, num_minibatches=2)
    return rollout_data(TASKS.get(kind, kind), **SETTINGS.get(kind, {}))


def causes(root, folder, kind, collections, **settings):
    """Train on a tiny task, and return the causes that are found, the most certain first."""
    trainer = make_trainer(root, Diagnosis(), max_epochs=collections, **settings)
    trainer.fit(RUNS[kind](folder), data_of(kind))
    return [finding.cause for finding in diagnose(root)]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("diagnosis") / "model")


@pytest.mark.parametrize("kind", list(RUNS))
def test_a_healthy_run_has_no_findings(kind, tiny_folder, tmp_path):
    assert causes(tmp_path, tiny_folder, kind, collections=3) == []


def test_a_stop_text_of_several_tokens_is_not_a_mistake(tiny_folder, tmp_path):
    usual = text_policy(tiny_folder, max_new_tokens=6)
    policy = TextPolicy(usual.language_model.config, replace(usual.prompt, stop="UP UP"), usual.sampling)
    trainer = make_trainer(tmp_path, Diagnosis(), max_epochs=2)
    data = rollout_data("prompts", num_groups=16)
    trainer.fit(GRPOModule(policy, ent_coef=0.01), datamodule=data)
    responses = [text for turn in data.rollout.responses for text in turn]
    assert any(text.endswith("UP UP") for text in responses) and any("UP UP" not in text for text in responses)
    assert diagnose(tmp_path) == []


def test_a_token_before_every_text_is_not_a_mistake(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    settings = json.loads(path.read_text())
    token = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [2], "tokens": ["<|im_start|>"]}},
    }
    path.write_text(json.dumps(settings))
    assert causes(tmp_path, str(tmp_path / "model"), "described", collections=2) == []


def test_updates_that_stop_early_are_measured(tiny_folder, tmp_path):
    assert causes(tmp_path, tiny_folder, "limited", collections=2) == []
    assert [sample.settings["stopped"] for sample in read_samples(tmp_path)] == [True, True]


@pytest.mark.parametrize("limit", [1e-3, 10.0])
@pytest.mark.parametrize("by", ["norm", "value"])
def test_gradients_may_be_clipped(limit, by, tiny_folder, tmp_path):
    settings = {"gradient_clip_val": limit, "gradient_clip_algorithm": by}
    assert causes(tmp_path, tiny_folder, "network", collections=2, **settings) == []


@pytest.mark.parametrize("kind", list(NESTED))
def test_credit_of_tokens_is_computed_again(kind, tiny_folder, tmp_path, monkeypatch):
    changes = {"credit": NESTED[kind], "optimizer": {"lr": 1e-3}, "kl": {"horizon": 50}}  # the weight of the penalty
    monkeypatch.setitem(RUNS, "continuing", lambda folder: ppo(folder, **changes))  # is adapted by 20% per collection
    assert causes(tmp_path, tiny_folder, "continuing", collections=2) == []


def changed(batch, change):
    """Return a batch with another mask of trained tokens."""
    return batch.replace(response_mask=change(batch.response_mask))


def without_last(mask):
    """Return a mask without the last token of each turn."""
    return mask & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)


def shifted(mask):
    """Return a mask of the tokens after those of each turn."""
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)


def averaged_over(change):
    """Average losses over other tokens in training steps, which give the sizes by keyword; the diagnosis does not."""

    def patched(old):
        return lambda self, tokens, mask, *rest, **sizes: old(
            self, tokens, change(mask) if sizes else mask, *rest, **sizes
        )

    return [(GradientModule, "reduced", patched)]


def of_mask(change):
    return [(GradientModule, "prepare", lambda old: lambda self, rollout: changed(old(self, rollout), change))]


def of_returns(change):
    return [(lrl.functional.advantages, "lambda_returns", lambda old: lambda *args, **kw: old(*change(*args), **kw))]


def of_groups(change):
    return [(lrl.algorithms.grpo, "group_advantages", lambda old: lambda returns, *rest: old(*change(returns, *rest)))]


def negated_surrogate(old):
    return lambda ratio, advantages, *clip: old(ratio, -advantages, *clip)


def at_temperature(factor):
    """Sample at another temperature than the one at which log-probabilities are recorded."""

    def change(old):
        def generate(self, prompts, bits, sampling):
            return old(self, prompts, bits, replace(sampling, temperature=sampling.temperature * factor))

        return generate

    return [(DecodeLoop, "generate", change)]


def training_at_temperature(factor):
    def change(old):
        return lambda self, layout, temperature, model=None: old(self, layout, temperature * factor, model)

    return [(LanguageModel, "distribution", change)]


def recomputed(old):
    """Replace the recorded log-probabilities by those of the current policy, so that all ratios are 1."""
    return lambda self, batch: old(self, batch.replace(old_logprobs=self.policy.evaluate(batch).logprobs.detach()))


def mixed(old):
    def minibatch(self, index):
        batch = old(self, index)
        return batch.replace(advantages=batch.advantages.roll(1, 0))

    return minibatch


def negated_reward(old):
    def step(self, action):
        observation, reward, *others = old(self, action)
        return observation, -reward, *others

    return step


def unseeded(old):
    return lambda self, *, seed=None, options=None: old(self, options=options)


def without_clip(old):
    return lambda ratio, advantages, *clip: ratio * advantages


def without_last_weights(old):
    """Give the optimiser all weights except the last two, which are those of the critic."""
    return lambda self, groups, *rest: old(self, [{"params": groups[0]["params"][:-2]}], *rest)


def inverted(old):
    return lambda ratio, *rest: old(1 / ratio, *rest)


def of_responses(old):
    return lambda ratio, *rest: old(ratio.prod(-1, keepdim=True).expand_as(ratio), *rest)


def scaled(factor):
    return lambda old: lambda self, loss, *args, **kw: old(self, factor * loss, *args, **kw)


def of_next_token(old):
    """Compare the logits at a position with the token after the next."""
    return lambda self, samples: old(self, samples.roll(-1, 1) if samples.ndim == 2 else samples)


def of_upper_bound(codec):
    """Return a factor that is too large for numbers whose range begins below 0."""
    return 999 / codec.high


def times_a_tenth(module, *args, **settings):
    """Make gradients smaller where they should be clipped."""
    for weight in module.parameters():
        if weight.grad is not None:
            weight.grad *= 0.1


def k1(logprobs, ref_logprobs):
    return logprobs - ref_logprobs


SIGN = [(module, "clipped_surrogate", negated_surrogate) for module in (lrl.algorithms.grpo, lrl.algorithms.ppo)]
MISTAKES = {
    "end token not trained": ("prompts", of_mask(without_last)),
    "padding trained": ("continuing", of_mask(torch.ones_like)),
    "shifted mask": ("prompts", of_mask(shifted)),
    "loss has the wrong sign": ("network", SIGN),
    "reward has the wrong sign": ("network", of_returns(lambda rewards, *rest: (-rewards, *rest))),
    "advantages leak between groups": (
        "episodes",
        of_groups(lambda returns, group, *rest: (returns, torch.zeros_like(group), *rest)),
    ),
    "truncation treated as termination": (
        "network",
        of_returns(lambda rewards, values, final, *rest: (rewards, values, torch.zeros_like(final), *rest)),
    ),
    "advantages leak across episodes": (
        "network",
        of_returns(
            lambda rewards, values, final, terminated, cut: (
                rewards,
                values,
                final,
                torch.zeros_like(terminated),
                cut & (torch.arange(len(cut)) == len(cut) - 1)[:, None],
            )
        ),
    ),
    "sampling uses wrong log-probabilities": ("prompts", at_temperature(0.5)),
    "training uses wrong log-probabilities": ("prompts", training_at_temperature(2.0)),
    "wrong reference policy": (
        "prompts",
        [(TextPolicy, "reference_logprobs", lambda old: lambda self, batch: old(self, batch) * 0.5)],
    ),
    "ratios are not clipped": ("network", [(lrl.algorithms.ppo, "clipped_surrogate", without_clip)]),
    "ratio does not depend on the policy": ("network", [(GradientModule, "step", recomputed)]),
    "ratios are those of whole responses": ("continuing", [(lrl.algorithms.ppo, "clipped_surrogate", of_responses)]),
    "ratio is inverted": ("network", [(lrl.algorithms.ppo, "clipped_surrogate", inverted)]),
    "gradients accumulate over minibatches": (
        "network",
        [(GradientModule, "optimizer_zero_grad", lambda old: lambda self, epoch, batch_idx, optimizer: None)],
    ),
    "end token not trained in minibatches": (
        "prompts",
        [(GradientModule, "step", lambda old: lambda self, batch: old(self, changed(batch, without_last)))],
    ),
    "sampled tokens not trained in minibatches": ("continuing", averaged_over(shifted)),  # padding has no gradient
    "log-probabilities are those of other tokens": ("prompts", [(Categorical, "logprobs", of_next_token)]),
    "gradients have the wrong size": ("network", [(GradientModule, "backward", scaled(3))]),
    "gradients have the wrong size in minibatches": ("prompts", [(GradientModule, "backward", scaled(0.1))]),
    "minibatches mix the fields of different turns": ("network", [(RolloutDataModule, "minibatch", mixed)]),
    "rewards of the wrappers have the wrong sign": ("network", [(NativeEnv, "step", negated_reward)]),
    "KL term has the wrong size": ("prompts", [(lrl.algorithms.grpo, "kl_estimate", lambda old: k1)]),
    "value loss has the wrong size": (
        "network",
        [(lrl.algorithms.ppo, "value_loss", lambda old: lambda *args: 3 * old(*args))],
    ),
    "critic is not trained": ("network", [(OptimizerConfig, "make", without_last_weights)]),
    "learning rate does not follow its schedule": (
        "network",
        [
            (
                lrl.training.optimizer,
                "learning_rate_factor",
                lambda old: lambda schedule, steps, warmup: old(schedule, steps // 2, warmup),
            )
        ],
    ),
    "turns are not trained on equally often": (
        "network",
        [(RolloutDataModule, "minibatch", lambda old: lambda self, index: old(self, 0))],
    ),
    "another gamma or gae_lambda is used": (
        "network",
        [
            (
                lrl.functional.advantages,
                "lambda_returns",
                lambda old: lambda *args, **kw: old(*args, **kw | {"gamma": 0.9}),
            )
        ],
    ),
    "the same episodes are played again": (
        "network",
        [
            (
                lrl.training.collect,
                "seeds",
                lambda old: lambda purpose, seed, episode, env: old(purpose, seed, 0 * episode, env),
            )
        ],
    ),
    "random numbers are used again": (
        "prompts",
        [(CollectionPlan, "keys", lambda old: lambda self, env, turn: old(self, env % self.group_size, turn))],
    ),
    "end of the collection treated as termination": (
        "continuing",
        [
            (
                lrl.training.collect,
                "final_values",
                lambda old: lambda policy, runner, step, last=False: old(policy, runner, step),
            )
        ],
    ),
    "updates end at another divergence than target_kl": (
        "limited",
        [
            (
                GradientModule,
                "_check_target_kl",
                lambda old: lambda self, kl: setattr(self, "skip_updates", bool(kl.sum() > self.target_kl)),
            )
        ],
    ),
    "weights do not follow the optimiser": (
        "network",
        [(torch.optim.AdamW, "step", lambda old: lambda self, closure=None: [old(self, closure), old(self)][0])],
    ),
    "prompts do not contain the system message": (
        "described",
        [(PromptTemplate, "messages", lambda old: lambda self, *args: old(self, *args)[1:])],
    ),
    "observations do not show the state": ("numbers", [(BinCodec, "_scale", lambda old: property(of_upper_bound))]),
    "minibatches are not shuffled": (
        "network",
        [(RolloutDataModule, "_order", lambda old: lambda self, batch, epoch, collection: torch.arange(len(batch)))],
    ),
    "minibatches are not shuffled in the second pass": (
        "network",
        [(RolloutDataModule, "_order", lambda old: lambda self, batch, epoch, collection: old(self, batch, 0, 0))],
    ),
    "gradients shrink before the optimiser step": (
        "network",
        [(GradientModule, "configure_gradient_clipping", lambda old: times_a_tenth)],
    ),
    "values are those of other tokens": (
        "continuing",
        [(ValueHead, "forward", lambda old: lambda self, states, mask: old(self, states.roll(-1, 1), mask))],
    ),
    "environment is not deterministic": ("network", [(CartPoleEnv, "reset", unseeded)]),
    "held-out episodes are used in training": (
        "network",
        [(lrl.training.collect, "seeds", lambda old: lambda purpose, seed, episode, env: 10_000 + (env + episode) % 2)],
    ),
    "tokens have wrong weights in the loss": (
        "prompts",
        [
            (
                lrl.training.gradient_module,
                "reduce_tokens",
                lambda old: lambda values, mask, *rest, **kw: old(values, torch.ones_like(mask), *rest, **kw),
            )
        ],
    ),
}


@pytest.mark.parametrize("cause", list(MISTAKES))
def test_a_mistake_in_the_code_is_the_first_finding(cause, tiny_folder, tmp_path, monkeypatch):
    kind, changes = MISTAKES[cause]
    for place, name, change in changes:
        monkeypatch.setattr(place, name, change(getattr(place, name)))
    cause = cause.removesuffix(" in minibatches").removesuffix(" in the second pass")
    cause = {"rewards of the wrappers have the wrong sign": "reward has the wrong sign"}.get(cause, cause)
    assert causes(tmp_path, tiny_folder, kind, collections=3 if kind in ("network", "limited") else 1)[0] == cause


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({"train/ratio_error": [0.0, 0.9]}, "sampling and training disagree"),
        ({"train/update_kl": [0.5] * 3}, "learning rate too high"),
        ({"train/update_kl": [1e-9] * 10}, "learning rate too low"),
        ({"train/explained_variance": [-1.0] * 20}, "critic is harmful"),
        ({"train/explained_variance": [0.0] * 20}, "critic learns nothing"),
        ({"train/entropy": [1.0] * 5 + [0.01] * 5}, "entropy collapsed"),
        ({"train/std": [1.0] * 5 + [0.04] * 5, "rollout/return": [0.2, 0.3] * 5}, "entropy collapsed"),
        ({"train/std": [1.0] * 5 + [1.7] * 5, "rollout/return": [0.2, 0.3] * 5}, "entropy rises"),
        ({"train/entropy": [0.4] * 5 + [1.5] * 5, "rollout/return": [0.2, 0.3] * 5}, "entropy rises"),
        ({"train/entropy": [0.4] * 5 + [1.5] * 5, "rollout/return": [0.0] * 10}, "entropy rises"),
        ({"rollout/group_return_std": [0.0] * 10, "rollout/success_rate": [0.5] * 10}, "groups are dead"),
        ({"rollout/invalid_action_rate": [0.0] * 5 + [0.5] * 5}, "invalid actions increase"),
        ({"rollout/token_limit_rate": [0.0] * 5 + [0.5] * 5}, "responses grow to the token limit"),
        ({"val/return": [10.0, 200.0, 500.0, 9.0]}, "policy collapsed after its best"),
        (
            {
                "val/return": [1.0, 5.0, 4.0, 3.2, 3.1],
                "rollout/return": np.arange(10.0),
                "rollout/reward_model": np.arange(10.0),
            },
            "reward rises while the result falls",
        ),
    ],
)
def test_metrics_show_a_problem(columns, cause):
    found = diagnose_metrics({name: np.array(values) for name, values in columns.items()})
    assert [finding.cause for finding in found] == [cause]


def test_the_entropy_may_rise_with_the_return():
    columns = {"train/entropy": np.array([0.4] * 5 + [1.5] * 5), "rollout/return": np.linspace(0, 1, 10)}
    assert diagnose_metrics(columns) == []
    columns |= {"rollout/return": np.ones(10), "rollout/success_rate": np.ones(10)}
    assert diagnose_metrics(columns) == []


@pytest.mark.parametrize(
    "columns",
    [
        {"train/entropy": [8.5] * 5 + [-1.3] * 5, "train/std": [1.0] * 5 + [0.2] * 5, "rollout/return": [1.0] * 10},
        {"train/entropy": [8.5] * 5 + [9.5] * 5, "train/std": [1.0] * 5 + [1.2] * 5, "rollout/return": [1.0] * 10},
        {"train/entropy": [1.4] * 5 + [-2.2] * 5, "train/std": [1.0] * 5 + [0.03] * 5, "rollout/return": range(10)},
        {"train/entropy": [1.4] * 5 + [-2.2] * 5, "train/std": [1.0] * 5 + [0.03] * 5},
        {"train/entropy": [-3.5] * 10, "rollout/return": [1.0] * 10},
    ],
    ids=["lower entropy", "higher entropy", "larger returns", "no returns", "no standard deviation"],
)
def test_the_entropy_of_a_gaussian_is_not_compared(columns):
    assert diagnose_metrics({name: np.array(values) for name, values in columns.items()}) == []


def test_a_solved_task_may_have_dead_groups():
    columns = {"rollout/group_return_std": np.zeros(10), "rollout/success_rate": np.ones(10)}
    assert diagnose_metrics(columns) == []


@pytest.mark.parametrize("every", [2, 20], ids=["while it trains", "at the end"])
def test_metrics_of_an_algorithm_without_minibatches_are_checked(every, tmp_path, caplog):
    data = RolloutDataModule(GymnasiumEnvs("CartPole-v1"), num_envs=2, num_steps=8)
    for name, metrics in {"calm": "train/update_kl\n", "fast": "train/update_kl\n0.5\n0.5\n0.5\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(metrics)
        trainer = make_trainer(tmp_path / name, Diagnosis(every_n_collections=every), max_epochs=2)
        with caplog.at_level("INFO", logger="lrl"):
            trainer.fit(TRPOModule(MLPPolicy((8,), init_seed=0)), datamodule=data)
    said = [record.getMessage() for record in caplog.records if record.name == "lrl"]
    assert said[0] == "Diagnosis: no alarm in the metrics; the turns of this run were not compared"
    assert len(said) == 2 and said[1].startswith("learning rate too high: ")


def test_a_broken_sample_is_named(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "000000.npz").write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match=r"000000\.npz cannot be read"):
        diagnose(tmp_path)


@pytest.mark.parametrize("recorded", [np.zeros(4), np.full(4, -0.3)])
def test_constant_advantages_of_a_sample_are_not_wrong(recorded):
    settings = {"algorithm": "REINFORCEPlusPlusModule"}
    sample = Sample(collection=0, settings=settings, observations=(), responses=(), pieces=(), arrays={})
    assert _distance(recorded, np.zeros(4), sample) == 0
    assert _distance(np.arange(4.0), np.zeros(4), sample) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(RUNS))
def test_the_diagnosis_does_not_change_the_weights(kind, tiny_folder, tmp_path):
    weights = []
    for name, callbacks in {"with": [Diagnosis()], "without": []}.items():
        module = RUNS[kind](tiny_folder)
        make_trainer(tmp_path / name, *callbacks, max_epochs=2).fit(module, data_of(kind))
        weights.append(torch.cat([weight.detach().reshape(-1) for weight in module.parameters()]))
    assert torch.equal(*weights)


def test_a_diagnosis_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lrl.training.diagnosis, "sample_of", lambda *args: 1 / 0)
    assert causes(tmp_path, None, "network", collections=2) == []
    assert (tmp_path / "diagnosis_errors.txt").read_text().count("ZeroDivisionError: division by zero") == 2
    told = [record.getMessage() for record in caplog.records if record.name == "lrl"]
    assert len([text for text in told if "Diagnosis failed in on_train_batch_start" in text]) == 1


def test_a_diagnosis_that_fails_does_not_report_success(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lrl.training.diagnosis, "diagnose_samples", lambda *args: 1 / 0)
    causes(tmp_path, None, "network", collections=2)
    told = " ".join(record.getMessage() for record in caplog.records if record.name == "lrl")
    assert "Diagnosis failed in on_train_batch_start" in told and "no mistake" not in told


def test_weights_in_bfloat16_are_recorded(tiny_folder, tmp_path):
    trainer = make_trainer(tmp_path, Diagnosis(), max_epochs=1, precision="bf16-true")
    trainer.fit(grpo(tiny_folder, kl={"coef": 0.0}), rollout_data("episodes"))
    assert len(list((tmp_path / "samples").iterdir())) == 1
