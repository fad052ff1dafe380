"""Exact figures and pictures during training."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv
from lightning.pytorch.loggers import CSVLogger

from lrl.codecs.codec import TextCodec
from lrl.data.run_data import ValidationConfig
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.evaluation.exact import lakes_of
from lrl.policies.baselines import ExpertActor
from lrl.training import pictures
from lrl.training.pictures import ExactSuccess, PolicyPicture, draw_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning under torch 2.13
PNG = b"\x89PNG"


class Lessons(L.LightningDataModule):
    """Data module without training data, with an environment for validation."""

    def __init__(self, validation_env: EnvFactory) -> None:
        super().__init__()
        self.validation_env, self.validation = validation_env, ValidationConfig()

    def train_dataloader(self) -> list[int]:
        return [0]

    val_dataloader = train_dataloader


class Expert(L.LightningModule):
    """Module whose policy is the expert."""

    def __init__(self, env: EnvFactory, policy: ExpertActor) -> None:
        super().__init__()
        self.policy, self.weight, self.steps = policy, torch.nn.Parameter(torch.zeros(1)), 0
        self.policy.connect(env.codec)

    def publish(self, means: dict[str, float]) -> None:
        self.steps += 100
        self.published = means
        self.trainer.loggers[0].log_metrics(means | {"clock/env_steps": self.steps}, step=self.steps)

    def training_step(self, batch: int) -> torch.Tensor:
        return self.weight.sum()

    def validation_step(self, batch: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(env: EnvFactory, folder: Path, *callbacks: L.Callback, policy: ExpertActor | None = None) -> Expert:
    expert = Expert(env, policy or ExpertActor())
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    trainer.fit(expert, datamodule=Lessons(env))
    return expert


@pytest.mark.slow
def test_a_run_on_frozen_lake_writes_the_exact_success_and_both_pictures(tmp_path: Path) -> None:
    expert = fit(GymnasiumEnvs("FrozenLake-v1"), tmp_path, ExactSuccess(), PolicyPicture(samples=2))
    assert expert.published["val/exact_success"] == pytest.approx(0.7402, abs=1e-4)
    assert expert.published["val/exact_success_of_optimum"] == pytest.approx(0.7402 / 0.7442, abs=1e-3)
    for name in ("policy.png", "learning_curve.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


class Stubborn(ExpertActor):
    """Policy with the best action except in the start state, where three of four responses are UP."""

    def act(self, observations: Any, memory: Any, keys: Any, sampling: Any) -> Any:
        decisions = super().act(observations, memory, keys, sampling)
        up = self._format.render("UP")
        wrong = [up if "row 0 column 0" in text else old for text, old in zip(observations, decisions.actions)]
        greedy = sampling.temperature == 0
        rare = [not greedy and turn % 4 == 0 for turn in keys.turn.tolist()]
        picked = [old if right else new for old, new, right in zip(decisions.actions, wrong, rare)]
        return replace(decisions, actions=picked)


def test_an_unsolved_map_is_logged_with_its_wrong_states(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = GymnasiumEnvs("FrozenLake-v1")
    with caplog.at_level("INFO", logger="lrl"):
        fit(env, tmp_path / "solved", ExactSuccess(samples=8))
        assert "FrozenLake is solved: exact success 0.740" in caplog.text
        caplog.clear()
        fit(env, tmp_path / "failed", ExactSuccess(samples=8), policy=Stubborn())
    assert "FrozenLake is NOT SOLVED: exact success 0.0" in caplog.text
    assert "row 0 column 0: UP has 0.75, LEFT (best) 0.25" in caplog.text
    assert [r.levelname for r in caplog.records if r.name == "lrl"] == ["WARNING", "WARNING"]


def test_random_maps_are_averaged(tmp_path: Path) -> None:
    env = GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0", kwargs={"split": "test"})
    expert = fit(env, tmp_path, ExactSuccess(num_maps=5), PolicyPicture(samples=1))
    assert 0.5 < expert.published["val/exact_success_of_optimum"] <= 1


class Silence(EnvFactory):
    """Factory with its own codec, whose environment must not be created."""

    codec = cast(TextCodec, object())

    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        raise AssertionError("no environment is played here")


def test_other_environments_are_not_reset(tmp_path: Path) -> None:
    module = SimpleNamespace(datamodule=Lessons(Silence()))
    ExactSuccess().on_validation_epoch_end(cast(L.Trainer, module), cast(L.LightningModule, None))


def test_settings_out_of_range_raise_their_name() -> None:
    with pytest.raises(ValueError, match="num_maps is 0"):
        ExactSuccess(num_maps=0)
    with pytest.raises(ValueError, match="samples is 0"):
        PolicyPicture(samples=0)


def test_the_picture_of_a_policy_has_arrows_and_probabilities_inside_their_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure))
    (lake,) = lakes_of(GymnasiumEnvs("FrozenLake-v1", {"desc": ["FFF", "HSG"], "is_slippery": False}), 1, 0)
    decisions = np.zeros((6, 4))
    decisions[4, 2], decisions[4, 3] = 0.75, 0.25  # in row 1 and column 1, RIGHT and UP
    draw_policy(lake, decisions, tmp_path / "policy.png")
    (axes,) = figures[0].axes
    cell = [text for text in axes.texts if all(1 < at < 2 for at in text.get_position())]
    assert [text.get_text() for text in cell] == ["S", "", ".75", "", ".25"]
    (right, up), (letters_right, letters_up) = cell[1::2], cell[2::2]
    assert right.xyann == up.xyann == (1.5, 1.5)
    assert right.xy[0] > 1.6 and right.xy[1] == 1.5 and letters_right.get_position() == pytest.approx((1.88, 1.5))
    assert up.xy[0] == 1.5 and up.xy[1] < 1.5 and letters_up.get_position() == pytest.approx((1.5, 1.12))
