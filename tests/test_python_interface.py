"""``import lrl``: lazy names, and training, loading and evaluating without the command line."""

import csv
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import StochasticWeightAveraging
from tiny_runs import demonstrations, grpo, network, ppo, rollout_data, save_tiny_model, sft
from transformers import AutoModelForCausalLM

import lrl
from lrl.api import QUIET, config_text
from lrl.codecs.numbers import NumberFormat
from lrl.evaluation.load import load_policy
from lrl.evaluation.run_records import minutes_of
from lrl.lm.config import LoRAConfig
from lrl.ranges import check_values
from lrl.search.policies import LinearPolicy
from lrl.types import PastTurn, RandomKeys

CPU = {"accelerator": "cpu", "limit_val_batches": 0}


def test_importing_lrl_imports_no_other_package():
    code = "import sys, lrl; print(*{'torch', 'lightning', 'gymnasium', 'transformers', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_every_name_of_the_interface_is_found_and_documented():
    assert set(lrl.__all__) == set(lrl._MODULES) and set(lrl.__all__) <= set(dir(lrl))
    page = Path("docs/python.md").read_text(encoding="utf-8")
    for name in lrl.__all__:
        assert getattr(lrl, name).__module__.startswith("lrl.")
        assert re.search(rf"\b{name}\b", page), f"docs/python.md does not mention {name}"
    with pytest.raises(AttributeError, match="has no attribute 'GRPOModul'"):
        lrl.GRPOModul  # noqa: B018


def text_policy(folder, **prompt):
    model = lrl.LanguageModelConfig(name=folder, lora=LoRAConfig(dropout=0.5))
    sampling = lrl.SamplingConfig(temperature=0.7, max_new_tokens=8)
    return lrl.TextPolicy(model, lrl.PromptTemplate(response_format="direct", **prompt), sampling)


@pytest.mark.parametrize("chooses", [False, True])
def test_logprobs_of_responses_equal_those_of_hugging_face(chooses, tmp_path):
    folder = save_tiny_model(tmp_path)
    model, prompt = lrl.LanguageModelConfig(name=folder), lrl.PromptTemplate(response_format="direct")
    policy = lrl.ScoringPolicy(model, prompt, temperature=0.7) if chooses else text_policy(folder)
    with pytest.raises(ValueError, match="policy is a .*Policy; it must be a TextPolicy or a ScoringPolicy with an en"):
        lrl.logprobs(policy, ["state 1"], ["LEFT"])
    policy.connect(lrl.ExpertQRows().codec)
    policy.configure()
    policy.train()
    policy.language_model.eval()
    observations, actions = ["state 1"] * 4 + ["state 2"] * 4, ["LEFT", "DOWN", "RIGHT", "UP"] * 2
    responses = [policy.write(action, "") for action in actions]
    found = lrl.logprobs(policy, observations, responses)
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(folder), policy.language_model.tokenizer
    expected = []
    for observation, response in zip(observations, responses, strict=True):
        prompt = policy.encode(observation, ())
        ids = [*tokenizer.encode_texts([response])[0], tokenizer.end_id]
        logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logits = logits if chooses else logits / 0.7
        expected.append(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].detach())
    if chooses:
        sums = torch.stack([tokens[:-1].sum() for tokens in expected]).view(2, 4)
        expected = [*(sums / 0.7).log_softmax(1).view(8, 1)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not ours.requires_grad
    assert policy.training and not policy.language_model.training
    assert lrl.logprobs(policy, [], []) == []


def test_logprobs_of_sampled_responses_are_those_of_sampling(tmp_path):
    policy = text_policy(save_tiny_model(tmp_path), stop="UP UP", history=1)
    policy.connect(lrl.ExpertQRows().codec)
    policy.configure()
    number = 400
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(number), turn=np.zeros(number, np.int64))
    past = (PastTurn("state 1", "LEFT"),)
    sampled = policy.act(["state 2"] * number, [past] * number, keys, policy.sampling)
    ids = [row[mask].tolist() for row, mask in zip(sampled.inputs["response_ids"], sampled.response_mask, strict=True)]
    same = [
        row for row in range(number) if policy.encode_responses([sampled.actions[row]])[0][: len(ids[row])] == ids[row]
    ]
    ends_at_text = [row for row in same if sampled.actions[row].endswith("UP UP")]
    chosen = [*same[:5], *ends_at_text[:5]]
    assert ends_at_text and len(chosen) > 5
    found = lrl.logprobs(
        policy, ["state 2"] * len(chosen), [sampled.actions[row] for row in chosen], [past] * len(chosen)
    )
    for row, ours in zip(chosen, found, strict=True):
        theirs = sampled.logprobs[row][sampled.response_mask[row]]
        torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=1e-4, atol=1e-4)
        assert len(ours) == len(theirs) or row not in ends_at_text


@pytest.mark.parametrize(
    ("observations", "responses", "sentence"),
    [
        ("abcd", ["LEFT"] * 4, "observations must be a list of texts"),
        (["a"], [None], "responses must be a list of texts"),
        (["a"] * 2, ["LEFT"], "there are 2 observations, 1 responses and 1 histories; there must be one of each"),
        (["a"], ["JUMP"], "responses has 'JUMP'; for a ScoringPolicy it must be a legal action"),
    ],
)
def test_mistakes_in_the_arguments_of_logprobs_raise(observations, responses, sentence, tmp_path):
    model = lrl.LanguageModelConfig(name=save_tiny_model(tmp_path))
    policy = lrl.ScoringPolicy(model, lrl.PromptTemplate(response_format="direct"))
    policy.connect(lrl.ExpertQRows().codec)
    with pytest.raises(ValueError, match=sentence):
        lrl.logprobs(policy, observations, responses)


@pytest.mark.slow
@pytest.mark.parametrize("reads_text", [False, True])
def test_a_loop_with_predict_plays_the_episodes_of_evaluate(reads_text):
    model = lrl.LanguageModelConfig(name="assets/tiny-lm")
    scoring = lrl.ScoringPolicy(model, lrl.PromptTemplate(response_format="direct", history=1))
    policy = scoring if reads_text else lrl.MLPPolicy([8], init_seed=0)
    results = lrl.evaluate(policy, "CartPole-v1", episodes=8, seed=5, num_envs=8)
    returns = []
    for seed in range(5, 13):
        envs = lrl.GymnasiumEnvs("CartPole-v1").make(1, policy.response_format)
        observations, _ = envs.reset(seed=[seed])
        memory, total, done = None, 0.0, False
        while not done:
            actions, memory = policy.predict(observations, memory)
            observations, rewards, terminated, truncated, _ = envs.step(actions)
            total, done = total + float(rewards[0]), bool(terminated[0] or truncated[0])
        returns.append(total)
    assert returns == results.returns.tolist() and len(set(returns)) > 1


def test_predict_samples_with_one_generator_for_all_turns():
    policy = lrl.load("random")
    lrl.evaluate(policy, "FrozenLake-v1", episodes=1)
    rng = np.random.default_rng(0)
    drawn = [policy.predict(["a"], rng=rng)[0][0] for _ in range(50)]
    rng = np.random.default_rng(0)
    again = [policy.predict(["a"], rng=rng)[0][0] for _ in range(50)]
    assert drawn == again and len(set(drawn)) == 4
    assert policy.predict([]) == ([], [])


def evaluated(actor, env_id):
    actor = lrl.load(actor) if isinstance(actor, str) else actor
    lrl.evaluate(actor, env_id, episodes=1)
    return actor


@pytest.mark.parametrize(
    ("actor", "arguments", "sentence"),
    [
        (lambda: lrl.load("random"), (["a"],), "this policy has no environment; train or evaluate it first"),
        (lambda: LinearPolicy(), ([np.zeros(4)],), "this policy has no environment; train or evaluate it first"),
        (lambda: evaluated("random", "FrozenLake-v1"), ("a",), "observations is a single observation"),
        (lambda: evaluated("random", "FrozenLake-v1"), ([3],), "observations contains int; this policy reads texts"),
        (lambda: evaluated("random", "FrozenLake-v1"), (["a", "b"], [()]), "memory must be a list of 2 histories"),
        (lambda: evaluated("random", "FrozenLake-v1"), (["a"], ()), "memory must be a list of 1 histories"),
        (lambda: evaluated("random", "FrozenLake-v1"), (["a"], None, 0), "rng is 0; it must be a generator such as"),
        (lambda: evaluated(lrl.MLPPolicy([8]), "CartPole-v1"), (np.zeros(4),), r"must be a list of arrays of shape"),
        (lambda: evaluated(lrl.MLPPolicy([8]), "CartPole-v1"), ([0.1, 0.2],), r"has the type float and the shape \(\)"),
        (
            lambda: evaluated(lrl.MLPPolicy([8]), "CartPole-v1"),
            ((np.zeros(4), {}),),
            r"has the type dict and the shape",
        ),
    ],
)
def test_a_mistake_in_the_arguments_of_predict_is_one_sentence(actor, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        actor().predict(*arguments)


def test_the_trainer_has_the_settings_of_a_run_of_the_command_line():
    shared = yaml.safe_load(Path("configs/base.yaml").read_text(encoding="utf-8"))["trainer"]
    assert {name: shared.get(name) for name in QUIET} | {"logger": False} == QUIET


def test_without_run_directory_nothing_is_printed_or_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    trainer = lrl.train(network(""), rollout_data("network"), max_epochs=2, **CPU)
    assert trainer.current_epoch == 2 and "train/loss" in trainer.callback_metrics
    assert not os.listdir(tmp_path) and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_run_directory_is_complete_and_its_policy_can_be_loaded(tmp_path, capfd):
    module, data, run = network(""), rollout_data("network"), tmp_path / "run"
    lrl.train(module, data, max_epochs=2, run_directory=run, accelerator="cpu")
    assert {"commit.txt", "command.txt", "run.log", "metrics.csv", "transcripts.jsonl"} <= set(os.listdir(run))
    assert "collection 2/2" in capfd.readouterr().err and "collection 2/2" in (run / "run.log").read_text()
    with (run / "metrics.csv").open() as file:
        assert len([row for row in csv.DictReader(file) if row["train/loss"]]) == 2
    assert minutes_of(run) is not None
    logger = logging.getLogger("lrl")
    assert logger.propagate and not logger.handlers and "LRL_RUN_DIRECTORY" not in os.environ
    ours, loaded = (lrl.evaluate(policy, data.env, episodes=5, temperature=1.0) for policy in (module.policy, run))
    assert ours.returns.tolist() == loaded.returns.tolist()
    low, high = ours.intervals()["return"]
    assert low <= ours.means()["return"] <= high
    with pytest.raises(ValueError, match="run_directory is .*run', which is not empty; name a new one"):
        lrl.train(module, data, max_epochs=2, run_directory=run, **CPU)
    for fewer in (1, 2):
        with pytest.raises(ValueError, match=f"max_epochs is {fewer}, but the run of .*last.ckpt has 2 epochs"):
            lrl.train(module, data, max_epochs=fewer, run_directory=tmp_path / "more", ckpt_path=run, **CPU)
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match="weights.ckpt', which contains weights only"):
        lrl.train(module, data, max_epochs=3, ckpt_path=tmp_path / "weights.ckpt", **CPU)
    assert not (tmp_path / "more").exists()


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path):
    def weights(name, epochs, **changes):
        module = network("", optimizer={"schedule": "constant"})
        lrl.train(module, rollout_data("network"), max_epochs=epochs, run_directory=tmp_path / name, **CPU, **changes)
        return module.state_dict()

    whole = weights("whole", 3)
    weights("short", 2)
    resumed = weights("resumed", 3, ckpt_path=tmp_path / "short")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_run_that_fails_before_training_leaves_no_directory(tmp_path):
    run, averaging = tmp_path / "runs" / "one", StochasticWeightAveraging(0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="callbacks has StochasticWeightAveraging"):
            lrl.train(
                network(""), rollout_data("network"), max_epochs=1, run_directory=run, callbacks=[averaging], **CPU
            )
        assert not run.parent.exists()


@pytest.mark.parametrize("kind", ["grpo", "lora", "ppo", "sft", "scoring", "head"])
def test_checkpoints_describe_policies_and_environments_completely(kind, tmp_path):
    folder = save_tiny_model(tmp_path)
    model, direct = lrl.LanguageModelConfig(name=folder), lrl.PromptTemplate(response_format="direct")
    module, data = {
        "grpo": lambda: (grpo(folder), rollout_data("prompts")),
        "lora": lambda: (grpo(folder, model={"lora": LoRAConfig(r=2, alpha=4)}), rollout_data("episodes")),
        "ppo": lambda: (ppo(folder, history=1), rollout_data("continuing")),
        "sft": lambda: (sft(folder), demonstrations()),
        "scoring": lambda: (lrl.GRPOModule(lrl.ScoringPolicy(model, direct)), rollout_data("episodes")),
        "head": lambda: (lrl.PPOValueHeadModule(lrl.HeadPolicy(model)), rollout_data("network")),
    }[kind]()
    assert config_text(module, data)


def test_a_policy_of_an_unknown_class_is_named(caplog):
    class OwnPolicy(lrl.MLPPolicy):
        pass

    assert config_text(lrl.PPOValueHeadModule(OwnPolicy((4,))), rollout_data("network")) == ""
    assert "a configuration cannot describe how OwnPolicy and GymnasiumEnvs were built" in caplog.text


def test_baselines_and_language_models_are_evaluated_by_name(tmp_path):
    expert, constant = (lrl.evaluate(name, "FrozenLake-v1", episodes=20) for name in ("expert", "constant"))
    assert expert.means()["success_rate"] > constant.means()["success_rate"]
    assert len(lrl.evaluate(save_tiny_model(tmp_path), "FrozenLake-v1", episodes=2)) == 2
    with pytest.raises(ValueError, match=r"nothing.ckpt'; it must be a checkpoint"):
        lrl.load("nothing.ckpt")


def train(**changes):
    """Call ``lrl.train`` with some other arguments."""
    arguments = {"module": network(""), "data": rollout_data("network"), "max_epochs": 1} | CPU | changes
    return lrl.train(arguments.pop("module"), arguments.pop("data"), **arguments)


def collecting(**settings):
    return lrl.RolloutDataModule(lrl.GymnasiumEnvs("CartPole-v1"), num_steps=4, **settings)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: lrl.RolloutDataModule("CartPole-v1"), "data.env is 'CartPole-v1'; it must be an instance of EnvFac"),
        (lambda: lrl.GRPOModule("gpt2"), "model.policy is 'gpt2'; it must be an instance of Policy"),
        (lambda: lrl.PPOValueHeadModule(lrl.MLPPolicy(), optimizer={"lr": 1}), "model.optimizer is {'lr': 1}; it must"),
        (lambda: lrl.SFTModule(None), "model.policy is None; it must be an instance of Policy"),
        (
            lambda: lrl.RolloutDataModule(lrl.GymnasiumEnvs),
            "data.env is <class .*; it must be an instance of EnvFactory",
        ),
        (
            lambda: lrl.RolloutDataModule(gym.make("CartPole-v1")),
            "data.env is <.*; it must be an instance of EnvFactory",
        ),
        (lambda: lrl.GymnasiumEnvs(gym.make("CartPole-v1")), "env.id is <.*CartPole-v1.*; it must be a text"),
        (
            lambda: lrl.PPOValueHeadModule(lrl.MLPPolicy(), clip_range="0.2"),
            "model.clip_range is '0.2'; it must be a number that is positive, or null",
        ),
        (lambda: collecting(num_envs=8.0), "data.num_envs is 8.0; it must be an integer that is at least 1, or null"),
        (lambda: collecting(num_envs=0), "data.num_envs is 0; it must be at least 1, or null"),
        (lambda: collecting(num_envs=True), "data.num_envs is True; it must be an integer that is at least 1"),
        (lambda: collecting(num_envs=2, num_minibatches=9), "data.num_minibatches is 9; it must be at most num_envs"),
        (lambda: lrl.load("configs"), "path is 'configs'; it must be a run directory with a checkpoint, or"),
        (lambda: lrl.OptimizerConfig(lr=True), "model.optimizer.lr is True; it must be a number that is positive"),
        (lambda: lrl.MLPPolicy(64), "policy.hidden_sizes is 64; it must be a list"),
        (lambda: lrl.MLPPolicy(normalise_observations="no"), "policy.normalise_observations is 'no'; it must be true"),
        (lambda: train(module=lrl.MLPPolicy()), "module is a MLPPolicy; it must be an algorithm"),
        (lambda: train(data="CartPole-v1"), "data is a str; it must be a data module, such as RolloutDataModule"),
        (lambda: train(max_epochs="2"), "max_epochs is '2'; it must be a whole number"),
        (lambda: train(callbacks="Diagnosis"), "callbacks is 'Diagnosis'; it must be a list of Lightning callbacks"),
        (lambda: train(run_dir="runs/x"), "run_dir is an argument neither of lrl.train nor of lightning.Trainer"),
        (lambda: lrl.evaluate(None, "CartPole-v1"), "policy is None; it must be a policy, a module that"),
        (lambda: lrl.evaluate("random", gym.make("CartPole-v1")), "env is <.*CartPole-v1.*; it must be an EnvFactory"),
        (lambda: lrl.evaluate("random", None), "env is None; it must be an EnvFactory, or the id of a registered"),
        (lambda: lrl.load("no/such-model"), "path is 'no/such-model', which is neither a run nor a language model: "),
    ],
)
def test_an_argument_of_another_type_is_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        call()


@pytest.mark.parametrize("hint", [list[NumberFormat], Sequence[NumberFormat], NumberFormat | None, list[int] | None])
def test_lists_and_null_are_checked_by_their_own_annotation(hint):
    right = {"formats": None if type(None) in get_args(hint) else [NumberFormat()]}
    check_values({"formats": hint}, right, "env")
    with pytest.raises(ValueError, match=r"^env.formats is 'integers'; it must be"):
        check_values({"formats": hint}, {"formats": "integers"}, "env")


def test_a_data_module_can_be_printed():
    assert "RolloutDataModule" in str(rollout_data("network"))


def test_a_similar_name_is_suggested():
    with pytest.raises(AttributeError, match="no attribute 'PPOModule'; similar: .*PPOValueHeadModule"):
        _ = lrl.PPOModule
    with pytest.raises(AttributeError, match="no attribute 'PPO'; similar: PPOValueHeadModule"):
        _ = lrl.PPO
    with pytest.raises(AttributeError, match="no attribute 'zzz'$"):
        _ = lrl.zzz


def test_results_of_a_module_are_printed_in_one_line():
    results = lrl.evaluate(network(""), "CartPole-v1", episodes=3, num_envs=2)
    assert str(results).startswith("EpisodeResults(episodes=3, return=") and "\n" not in str(results)


def test_an_evaluation_on_another_environment_leaves_the_policy_as_it_was(tmp_path):
    policy = lrl.ScoringPolicy(
        lrl.LanguageModelConfig(name=save_tiny_model(tmp_path)), lrl.PromptTemplate(response_format="direct")
    )
    lake = lrl.GymnasiumEnvs("FrozenLake-v1")
    policy.connect(lake.codec)
    policy.configure()
    before = list(policy._candidate_ids)
    lrl.evaluate(policy, lrl.GymnasiumEnvs("CliffWalking-v1", max_episode_steps=3), episodes=1)
    assert policy.codec is lake.codec and policy.action_texts == lake.codec.action_texts
    assert policy._candidate_ids == before
    with pytest.raises(ValueError, match="to the same tokens"):  # the model has no words for these actions
        lrl.evaluate(policy, "MountainCar-v0", episodes=1)
    assert policy.codec is lake.codec and policy._candidate_ids == before


def test_an_environment_by_name_has_the_number_format_of_the_policy(monkeypatch):
    seen = []
    integers = lrl.GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(kind="integers"))
    policy = lrl.load("constant")
    policy.connect(integers.codec)
    monkeypatch.setattr("lrl.api.evaluate_policy", lambda actor, env, *_: seen.append(env.codec.numbers))
    lrl.evaluate(policy, "CartPole-v1")
    assert seen == [NumberFormat(kind="integers")]
    monkeypatch.undo()
    assert len(lrl.evaluate(policy, "FrozenLake-v1", episodes=2)) == 2, "it has no numbers"


def test_a_checkpoint_is_not_loaded_for_an_environment_of_another_shape(tmp_path):
    lrl.train(network(""), rollout_data("network"), max_epochs=1, run_directory=tmp_path / "run", **CPU)
    with pytest.raises(ValueError, match=r"whose weight actor.0.weight has the shape \(8, 4\) instead of \(8, 6\)"):
        load_policy(tmp_path / "run", lrl.GymnasiumEnvs("Acrobot-v1"))
