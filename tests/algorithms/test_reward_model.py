"""Reward models: their loss and R2 by hand, runs that stop early and resume, and what they learn."""

import csv

import gymnasium as gym
import numpy as np
import pytest
import tiny_runs
import torch
from commands import run_command
from gymnasium import spaces
from lightning.pytorch.callbacks import EarlyStopping
from tiny_runs import demonstrations, from_settings

from lrl.algorithms.reward_model import RewardModelModule, r2
from lrl.data.transitions import TransitionsDataModule
from lrl.envs.minari_storage import DatasetWriter
from lrl.evaluation.load import load_policy
from lrl.rewards.reward import Row
from lrl.rewards.reward_model import LearnedReward, load_reward_model
from lrl.training.checkpoint import CollectionCheckpoint

BOX = spaces.Box(-np.inf, np.inf, (3,))
SMALL = {"hidden_sizes": (16, 16), "dropout": 0.2}


def write(dataset_id, action_space, episodes):
    """Write episodes of (observations, one more than actions; actions; rewards)."""
    with DatasetWriter(dataset_id, BOX, action_space, None) as writer:
        for seed, (observations, actions, rewards) in enumerate(episodes):
            steps = len(actions)
            one = {"seed": seed, "context": None, "success": False, "random_steps": []}
            one |= {
                "observations": list(observations),
                "actions": list(actions),
                "rewards": [float(r) for r in rewards],
            }
            one |= {"terminations": [False] * steps, "truncations": [False] * (steps - 1) + [True]}
            writer.add([one])
        writer.finish({})


def linear_episodes(count, steps, seed=0):
    """Rewards that are a known function of state and action."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        observations, actions = rng.normal(size=(steps + 1, 3)), rng.uniform(-1, 1, size=(steps, 2)).astype(np.float32)
        yield observations, actions, 3 * observations[:-1, 0] - 2 * actions[:, 1] + 10


def pendulum_episodes(count):
    """Random actions in Pendulum, whose reward is -(angle^2 + .1 velocity^2 + .001 torque^2)."""
    env = gym.make("Pendulum-v1")
    for seed in range(count):
        env.action_space.seed(seed)
        observations, actions, rewards = [env.reset(seed=seed)[0]], [], []
        for _ in range(200):
            actions.append(env.action_space.sample())
            observation, reward, *_ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(reward)
        yield observations, actions, rewards
    env.close()


def memorable_episodes(count, steps=20):
    """The reward is a number of the episode, which a state names and no other episode explains."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        name, number = rng.normal(size=3), rng.normal()
        observations = name + 0.01 * rng.normal(size=(steps + 1, 3))
        yield observations, rng.uniform(-1, 1, size=(steps, 2)).astype(np.float32), [number] * steps


@pytest.fixture(scope="session")
def datasets(once):
    """A folder with all data sets of these tests."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINARI_DATASETS_PATH", str(folder))
            push = spaces.Box(-1.0, 1.0, (2,))
            write("lrl/linear-v0", push, linear_episodes(20, 10))
            write("lrl/memorable-v0", push, memorable_episodes(24))
            write("lrl/pendulum-v0", spaces.Box(-2.0, 2.0, (1,)), pendulum_episodes(60))

    return once("transitions", make)


@pytest.fixture(autouse=True)
def found(datasets, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(datasets))


def module_of(**settings):
    return from_settings(RewardModelModule, **SMALL | settings)


def data_of(name="linear", **settings):
    return TransitionsDataModule(f"lrl/{name}-v0", **{"batch_size": 32} | settings)


def fit(root, *callbacks, module=None, data=None, **settings):
    return tiny_runs.train(root, *callbacks, module=module or module_of(), data=data or data_of(), **settings)


# -- figures by hand --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_r2_is_one_for_the_truth_zero_for_the_mean_and_defined_for_a_constant():
    assert r2(0.0, 4.0) == 1 and r2(4.0, 4.0) == 0 and r2(6.0, 4.0) == -0.5
    assert r2(1.0, 0.0) == 0


def test_the_loss_is_the_squared_error_in_z_scores():
    module = module_of(members=2)
    tiny_runs.train(None, module=module, data=data_of())
    module.model.rewards.mean.fill_(10.0)
    module.model.rewards.std.fill_(2.0)
    errors = module.loss(torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([12.0, 6.0]))  # z-scores 1 and -2
    assert errors.tolist() == [[1, 9], [1, 1]]


def test_held_out_figures_equal_a_loop_over_steps(tmp_path):
    module, data = module_of(members=3), data_of(validation_share=0.3)
    trainer = fit(tmp_path, module=module, data=data, max_epochs=2)
    (logged,) = trainer.validate(module, datamodule=data, verbose=False) and [dict(trainer.logger.rows[-1][1])]
    inputs, rewards = data.rows("validation")
    model, losses, errors, deviations = module.model.eval(), [], [], []
    for row, reward in zip(inputs, rewards.tolist(), strict=True):
        with torch.no_grad():
            members = model(row[None])[:, 0].double().numpy()
        mean, std = float(model.rewards.mean), float(model.rewards.std)
        losses += [(member - (reward - mean) / std) ** 2 for member in members]
        errors.append((members.mean() * std + mean - reward) ** 2)
        deviations.append(members.std() * std)
    centred = rewards.double().numpy() - rewards.double().numpy().mean()
    assert logged["val/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert logged["val/r2"] == pytest.approx(1 - np.sum(errors) / np.sum(centred**2), rel=1e-4)
    assert logged["val/disagreement"] == pytest.approx(np.mean(deviations), rel=1e-4)


def test_each_member_is_trained_as_if_it_were_alone(tmp_path):
    module, data = module_of(members=2, dropout=0.0), data_of()
    tiny_runs.train(tmp_path, module=module, data=data, limit_train_batches=0)
    batch = data.batch(0, 0)
    module.training_step(batch, 0).backward()
    for member in module.model.members:
        together = [weight.grad.clone() for weight in member.parameters()]
        member.zero_grad()
        scores = member(module.model.inputs(batch[0]))[:, 0]
        torch.nn.functional.mse_loss(scores, module.model.rewards(batch[1])).backward()
        assert all(torch.allclose(a, b.grad, atol=1e-6) for a, b in zip(together, member.parameters(), strict=True))
    first, second = module.model.members
    assert not torch.equal(first[0].weight, second[0].weight)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_training_split(tmp_path):
    module, data = module_of(), data_of(validation_share=0.4)
    fit(tmp_path, module=module, data=data, max_epochs=1)
    inputs, rewards = (tensor.double().numpy() for tensor in data.rows("train"))
    np.testing.assert_allclose(module.model.inputs.mean, inputs.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(module.model.rewards.std, [rewards.std()], rtol=1e-5)
    assert float(module.model.minimum) == pytest.approx(rewards.min())


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = fit(tmp_path / "whole", CollectionCheckpoint(1, "val/loss", "min"), max_epochs=4)
    fit(tmp_path / "half", CollectionCheckpoint(1, "val/loss", "min"), max_epochs=2)
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    resumed = fit(tmp_path / "half", CollectionCheckpoint(1, "val/loss", "min"), max_epochs=4, ckpt_path=last)
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (resumed, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (trainer.optimizers[0].state_dict()["state"] for trainer in (resumed, whole))
    assert all(torch.equal(ours[key][name], value) for key, state in theirs.items() for name, value in state.items())
    assert resumed.logger.rows == whole.logger.rows[-len(resumed.logger.rows) :] and len(resumed.logger.rows) == 4
    assert resumed.datamodule.clocks["optimizer_steps"] == whole.datamodule.clocks["optimizer_steps"] == 4 * 5
    assert whole.logger.rows[-1][0] == 20 and {"train/loss", "clock/optimizer_steps"} <= whole.logger.rows[-1][1].keys()


def test_dropout_depends_only_on_the_position_in_the_run(tmp_path):
    module, data = module_of(dropout=0.5), data_of()
    tiny_runs.train(tmp_path, module=module, data=data, limit_train_batches=0)
    batch, losses = data.batch(0, 0), []
    for place in (0, 1, 0):
        torch.manual_seed(len(losses))
        losses.append(float(module.training_step(batch, place).detach()))
    assert losses[0] == losses[2] != losses[1]


def test_early_stopping_and_the_best_checkpoint_read_the_held_out_loss(tmp_path):
    stopping = EarlyStopping("val/loss", patience=2, min_delta=1e9, check_on_train_epoch_end=False)
    trainer = fit(tmp_path, CollectionCheckpoint(1, "val/loss", "min"), stopping, max_epochs=9)
    assert trainer.current_epoch == 3 and (tmp_path / "checkpoints" / "best.ckpt").exists()


def test_a_run_directory_holds_a_reward_model(tmp_path):
    module = module_of(members=2)
    fit(tmp_path, CollectionCheckpoint(1), module=module)
    loaded = load_reward_model(tmp_path)
    observations, actions = [np.ones(3), np.zeros(3)], [np.zeros(2), np.ones(2)]
    expected = module.model.eval().predict(observations, actions, 0.3)
    np.testing.assert_array_equal(loaded.predict(observations, actions, 0.3), expected)
    rows = [Row(observation="", q_values=(), action=0, native_observation=one) for one in observations]
    reward = LearnedReward(str(tmp_path), invalid=None, disagreement_coef=0.3)
    np.testing.assert_array_equal(reward(rows, ["", ""], [actions[0], None])[:1], expected[:1])
    assert reward(rows, ["", ""], [None, None]).tolist() == [float(module.model.minimum)] * 2


def test_data_that_do_not_fit_raise_one_sentence(tmp_path):
    fit(tmp_path, CollectionCheckpoint(1), max_epochs=1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    for change, sentence in (
        ({"module": module_of(members=2)}, "members is 2, in the checkpoint it was 1; resume"),
        ({"data": data_of("pendulum")}, "action_space is .*, in the checkpoint it was "),
        ({"data": data_of(seed=5)}, "seed_everything is 5, in the checkpoint it was 0"),
    ):
        with pytest.raises(ValueError, match=sentence) as caught:
            fit(tmp_path / "other", ckpt_path=last, **change)
        assert "\n" not in str(caught.value)
    checkpoint = torch.load(last, weights_only=True)
    del checkpoint["lrl"]["reward_model"]
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="the checkpoint contains no reward model"):
        fit(tmp_path / "other", ckpt_path=tmp_path / "foreign.ckpt")


def test_other_data_and_sizes_raise_their_name(tmp_path):
    with pytest.raises(ValueError, match="data is a DemonstrationsDataModule; it must be a TransitionsDataModule"):
        fit(tmp_path, data=demonstrations())
    with pytest.raises(ValueError, match=r"model.hidden_sizes is \[4, 0\]; it must be one or more positive sizes"):
        RewardModelModule(hidden_sizes=(4, 0))


def test_a_reward_model_is_not_a_policy(tmp_path):
    fit(tmp_path, CollectionCheckpoint(1), max_epochs=1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lrl"]["config"] = "model: {class_path: RewardModelModule, init_args: {}}"
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="a run of RewardModelModule, which holds no policy"):
        load_policy(path)


@pytest.mark.slow
def test_the_configuration_trains_and_tests_from_the_command_line(datasets, tmp_path):
    command = "python -m lrl {} --config configs/half_cheetah/reward_model.yaml --trainer.accelerator cpu"
    command += " --data.init_args.dataset_id lrl/pendulum-v0 --run_directory {} --trainer.max_epochs 2"
    run, tested = tmp_path / "run", tmp_path / "tested"
    result = run_command(command.format("fit", run), MINARI_DATASETS_PATH=str(datasets))
    assert result.returncode == 0, result.stderr
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"train/loss", "val/loss", "val/r2", "clock/optimizer_steps"} <= rows[0].keys()
    assert load_reward_model(run).about["hidden_sizes"] == [256, 256]
    original = {"lr": 1e-3, "weight_decay": 1e-4, "decoupled": False}
    assert type_of_optimizer(run / "checkpoints" / "best.ckpt") == original
    command += f" --ckpt_path {run / 'checkpoints' / 'best.ckpt'}"
    result = run_command(command.format("test", tested), MINARI_DATASETS_PATH=str(datasets))
    assert result.returncode == 0, result.stderr
    assert "lrl/pendulum-v0: test/loss" in result.stderr and "on 1200 steps of 6 held-out episodes" in result.stderr


def type_of_optimizer(path):
    """Difference between the original's Adam and AdamW, whose weight decay is decoupled."""
    (group,) = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    return {"lr": group["lr"], "weight_decay": group["weight_decay"], "decoupled": group["decoupled_weight_decay"]}


# -- learning ---------------------------------------------------------------------------------------------------------


class Ascending(RewardModelModule):
    """Reward model that maximises its error."""

    def loss(self, scores, rewards):
        return -super().loss(scores, rewards)


@pytest.mark.learning
@pytest.mark.parametrize("kind", [RewardModelModule, Ascending])
def test_the_reward_of_pendulum_is_learned_from_held_out_episodes_unless_the_sign_is_wrong(kind, tmp_path):
    module = kind(hidden_sizes=(64, 64), dropout=0.0)
    data = data_of("pendulum", batch_size=256)
    epochs = 12 if kind is RewardModelModule else 3
    trainer = tiny_runs.train(tmp_path, module=module, data=data, max_epochs=epochs, limit_val_batches=0)
    trainer.test(module, datamodule=data, verbose=False)
    learned = trainer.logger.rows[-1][1]["test/r2"]
    assert learned >= 0.95 if kind is RewardModelModule else not learned >= 0.5


@pytest.mark.learning
def test_memorised_training_episodes_do_not_improve_the_held_out_r2(tmp_path):
    module, data = (
        module_of(hidden_sizes=(64, 64), dropout=0.0, optimizer={"lr": 1e-2}),
        data_of("memorable", batch_size=64),
    )
    trainer = fit(tmp_path, module=module, data=data, max_epochs=30)
    last = {name: value for _, row in trainer.logger.rows for name, value in row.items()}
    inputs, rewards = data.rows("train")
    with torch.no_grad():
        memory = r2(float(module.loss(module.model.eval()(inputs), rewards).mean()), 1.0)
    assert memory > 0.9 and last["val/r2"] < 0.5
