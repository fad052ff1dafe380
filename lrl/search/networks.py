"""PPO and TRPO on the tasks of ProPS, as baselines of ``lrl search_table``, with the code of ``lrl fit``.

One rule, chosen before any run, determines the settings of all tasks. They are those of
``configs/half_cheetah/ppo_mlp.yaml`` and ``trpo_mlp.yaml`` if actions are a Box, else those of ``configs/cartpole/``,
except that

1. observations are normalised if they are a Box, and one-hot if they are Discrete;
2. step sizes are constant, because the number of steps of a budget in episodes is not known in advance;
3. if actions are a Box, ``max_kl`` of TRPO is 0.01 for each dimension of an action, as it is on HalfCheetah.

Training ends with the collection in which the network has played as many episodes as a search, or ``max_env_steps``
steps. The training episodes, in the order in which they ended, are cut into blocks of as many episodes as a proposal
has, so that there are at most as many blocks as a search has proposals. The highest mean return of a block corresponds
to the best iteration of a search, and is biased upwards in the same way. In these episodes actions are sampled, and the
policy may be updated within a block. The chosen policy is the final one. It plays the fresh episodes of a search with
the same seed, and takes the most probable action or the mean of its distribution.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import yaml
from gymnasium.spaces import Box

from lrl import api
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.run_data import ValidationConfig
from lrl.evaluation.statistics import headline_seed
from lrl.files import shipped
from lrl.policies.policy import Policy
from lrl.registry import build
from lrl.search.experiments import SearchRun, record_of
from lrl.search.rollouts import fresh_seeds, make_batched, play_seeds
from lrl.search.tasks import TASKS, SearchBudget, SearchTask
from lrl.training.gradient_module import GradientModule
from lrl.types import RandomKeys, SamplingConfig

_SIZES = ("num_envs", "num_steps", "num_epochs", "num_minibatches")
"""Settings of the data module that are taken from the configuration."""
_MAX_KL = 0.01
"""Maximum KL divergence of one TRPO update in nats, for each dimension of an action."""


def train(run: SearchRun, budget: SearchBudget) -> dict[str, Any]:
    """Train a network with PPO or TRPO, and return its record.

    Returns:
        See :func:`~lrl.search.experiments.record_of`. ``values`` contains the mean returns of blocks of ``rollouts``
        consecutive training episodes, and ``best_proposal`` is the index of the best block. ``parameters`` and
        ``space`` are None. ``num_weights`` is the number of weights of the policy without its critic.

    Raises:
        ValueError: If fewer than ``rollouts`` episodes ended within the budget.
    """
    task, seed, started = TASKS[run.task], headline_seed(run.index), time.perf_counter()
    config = settings(task, run.method, seed)
    with _one_thread():
        module, data, played = _fit(task, config, budget, seed)
        trained = time.perf_counter() - started
        fresh = _fresh_returns(task, module.policy, budget, seed)
    values = block_means(played.returns[: budget.episodes], budget.rollouts)
    if not len(values):
        raise ValueError(
            f"max_env_steps is {budget.max_env_steps}, in which {len(played.returns)} episodes of {run.task} ended; "
            f"there must be at least {budget.rollouts}, the setting rollouts."
        )
    critic = {id(weight) for weight in module.policy.critic_parameters()}
    return record_of(
        run,
        budget,
        values,
        fresh,
        trained,
        episodes=int(data.clocks["episodes"]),
        env_steps=int(data.clocks["env_steps"]),
        parameters=None,
        space=None,
        settings=config,
        num_weights=sum(weight.numel() for weight in module.policy.parameters() if id(weight) not in critic),
    )


def settings(task: SearchTask, method: str, seed: int) -> dict[str, Any]:
    """Return the settings of a run according to the rule of this module: ``model``, ``data`` and ``trainer``.

    Args:
        task: the task.
        method: one of :data:`~lrl.search.experiments.NETWORKS`.
        seed: seed of the network's initial weights.
    """
    observations, actions = task.env_factory().spaces
    path = shipped(f"configs/{'half_cheetah' if isinstance(actions, Box) else 'cartpole'}/{method}_mlp.yaml")
    assert path is not None, "the configurations are part of the package"
    config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    model = config["model"]["init_args"]
    model["policy"]["init_args"] |= {"normalise_observations": isinstance(observations, Box), "init_seed": seed}
    (model if method == "trpo" else model["optimizer"])["schedule"] = "constant"
    if method == "trpo" and isinstance(actions, Box):
        model["max_kl"] = round(_MAX_KL * int(np.prod(actions.shape)), 6)
    sizes = {name: value for name, value in config["data"]["init_args"].items() if name in _SIZES}
    clip = {name: value for name, value in config["trainer"].items() if name == "gradient_clip_val"}
    return {"model": config["model"], "data": sizes, "trainer": clip}


def block_means(returns: Sequence[float], size: int) -> np.ndarray:
    """Return the means of consecutive blocks of returns, float64 ``(block,)``, without an incomplete last block.

    Args:
        returns: returns of episodes, in order.
        size: number of episodes per block.
    """
    blocks = len(returns) // size
    return np.asarray(returns[: blocks * size], dtype=np.float64).reshape(blocks, size).mean(1)


def _fit(
    task: SearchTask, config: dict[str, Any], budget: SearchBudget, seed: int
) -> tuple[GradientModule, RolloutDataModule, TrainingReturns]:
    """Train until the budget is spent.

    Raises:
        SystemExit: If a signal ended the run before the budget was used, which Lightning does not report.
    """
    module, played = build(GradientModule, config["model"]), TrainingReturns(budget.episodes)
    held_out, steps = ValidationConfig(episodes=0), budget.max_env_steps
    data = RolloutDataModule(task.env_factory(), **config["data"], max_env_steps=steps, validation=held_out, seed=seed)
    settings = {"accelerator": "cpu", "limit_val_batches": 0} | config["trainer"]
    api.train(module, data, max_epochs=-1, callbacks=[played], **settings)
    if not (data.spent or played.spent):
        raise SystemExit(128 + signal.SIGTERM)
    return module, data, played


def _fresh_returns(task: SearchTask, policy: Policy, budget: SearchBudget, seed: int) -> np.ndarray:
    """Return the returns of the fresh episodes, ``(episode,)``, in the environments of searches."""
    envs = make_batched(task.env_factory(), budget.rollouts)
    rows = np.arange(envs.num_envs)
    keys = RandomKeys(seed=seed, purpose="evaluation", collection=0, env=rows, turn=np.zeros_like(rows))
    greedy = SamplingConfig(temperature=0.0)

    def decide(observations: np.ndarray) -> Any:
        """Return the greedy actions of all rows."""
        return policy.act(observations, [()] * len(rows), keys, greedy).actions  # pyright: ignore[reportArgumentType]

    with closing(envs):
        return play_seeds(decide, envs, fresh_seeds(seed, budget.fresh_episodes), task.max_steps)[0]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread in torch, so that a run can be repeated exactly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class TrainingReturns(L.Callback):
    """Callback that keeps the returns of training episodes in the order in which they ended.

    Episodes that end in the same step are in the order of their environments. Checkpoints do not contain the returns.

    Args:
        max_episodes: number of episodes after which the run ends, with the end of a collection.

    Attributes:
        returns: undiscounted return of each episode.
    """

    def __init__(self, max_episodes: int) -> None:
        self.max_episodes = max_episodes
        self.returns: list[float] = []

    @property
    def spent(self) -> bool:
        """True if ``max_episodes`` have ended."""
        return len(self.returns) >= self.max_episodes

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the episodes of the latest collection."""
        rollout = trainer.datamodule.rollout  # pyright: ignore[reportAttributeAccessIssue]
        if rollout is None:
            return
        self.returns += rollout.metrics["episode_return"].tolist()
        if self.spent:
            trainer.should_stop = True
