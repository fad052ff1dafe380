"""Prompted policy search (ProPS, arXiv:2511.21928): a language model proposes parameters and gets their returns.

Objective, maximised over the parameters w of a small policy without gradients:

    J(w) = E[ sum_t r_t | a_t = pi_w(s_t) ]

The loop, for k = 1 .. num_iterations:

    w_k = searcher(h_1 .. h_m, (w_1, J_1) .. (w_k-1, J_k-1))      h: warm-up, random policies with their returns
    J_k = mean return of num_rollouts episodes with w_k

The result is the first w_k with the largest J_k. Any searcher can be used: ``PromptedSearcher`` requests proposals
from a language model; ``RandomSearch``, ``CrossEntropyMethod``, ``CMAES`` and ``AugmentedRandomSearch`` are baselines
with an equal budget.

**Departures from the paper** (its code at 5d75218)

1. Proposals are checked: each index once, legal values, no repeats. The next prompt contains the reason of a rejection.
2. The prompt does not contain the known optimum, unless ``searcher.prompt.optimum`` is set.
3. The prompt contains the actual number of iterations, counted from 1, and the number of episodes of each mean.
4. Random policies are clipped to the legal range, and played for as many episodes as proposals.
5. Actions are clipped to the action space, as the environments assume when they penalise large actions.
6. ProPS and ProPS+ differ in ``searcher.prompt`` and ``searcher.history.trajectories`` only.
7. The history can be limited to the best and the most recent policies; the original shows all, which can exceed the
   context of the model.
8. All randomness is seeded; an interrupted search resumes with the same history and the same proposals.
9. The best policy is also evaluated on held-out episodes, which are not used for selection.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from lrl.data.run_data import MinibatchLoader, RunDataModule, ValidationConfig
from lrl.envs.factory import EnvFactory
from lrl.evaluation.load import requests_line
from lrl.faults import appending
from lrl.functional.random import seeds
from lrl.ranges import NonNegativeInt, PositiveInt, check_arguments
from lrl.registry import register
from lrl.search.described import task_in_words
from lrl.search.policies import SearchedPolicy
from lrl.search.rollouts import make_batched, play_parameters, proposal_seeds
from lrl.search.searchers import Searcher, Trial
from lrl.training.module import PolicyModule


@register
class SearchDataModule(RunDataModule):
    """Lightning data module of a search, which counts the policies; one Lightning epoch plays one policy.

    A search ends after ``warmup`` random policies and ``num_iterations`` proposals; ``trainer.max_epochs`` must be at
    least as large as their sum.

    Args:
        env: factory of the environments.
        num_iterations: number of proposals.
        num_rollouts: number of episodes of each policy, including the random ones.
        max_steps: number of steps after which training episodes are truncated. Held-out episodes end at the
            environment's own limit; ``env.max_episode_steps`` limits both.
        warmup: number of random policies that are played before the first proposal.
        validation: held-out episodes of the best policy so far.
        seed: seed of all randomness in the run.
    """

    collects = True

    def __init__(
        self,
        env: EnvFactory,
        num_iterations: PositiveInt = 400,
        num_rollouts: PositiveInt = 20,
        max_steps: PositiveInt = 1000,
        warmup: NonNegativeInt = 0,
        validation: ValidationConfig = ValidationConfig(episodes=100, num_envs=100),
        seed: int = 0,
    ) -> None:
        check_arguments(SearchDataModule.__init__, locals(), "data")
        super().__init__(env, validation, seed, "env_steps", "episodes", "tokens")
        self.num_iterations, self.num_rollouts = int(num_iterations), int(num_rollouts)
        self.max_steps, self.warmup = int(max_steps), int(warmup)
        self.played = 0
        """Number of policies that were played, including the random ones."""

    @property
    def num_policies(self) -> int:
        """Number of policies in the whole search."""
        return self.warmup + self.num_iterations

    @property
    def finished(self) -> bool:
        """True if all policies were played."""
        return self.played >= self.num_policies

    def setup(self, stage: str) -> None:
        """Check the type of the model.

        Raises:
            ValueError: If the model has no searcher.
        """
        module = None if self.trainer is None else self.trainer.lightning_module
        if module is not None and not hasattr(module, "searcher"):
            raise ValueError(
                f"data is a SearchDataModule, which has nothing for a {type(module).__name__} to train on; the model "
                "must be a PromptedSearchModule."
            )

    def train_dataloader(self) -> MinibatchLoader:
        """Return a loader with one item: the index of the next proposal, negative for warm-up policies."""
        return MinibatchLoader(self, lambda: 1, lambda index: self.played - self.warmup)

    def tick(self, env_steps: float, episodes: float, tokens: float) -> None:
        """Count one policy, and advance the clocks by its steps, episodes and tokens."""
        self.played += 1
        # Checkpoints are read with weights_only=True, which rejects NumPy's integers.
        self.advance(env_steps=int(env_steps), episodes=int(episodes), tokens=int(tokens))

    def state_dict(self) -> dict[str, Any]:
        """Return the clocks and the number of policies that were played."""
        return super().state_dict() | {"played": self.played}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        super().load_state_dict(state_dict)
        self.played = int(state_dict["played"])


@register
class PromptedSearchModule(PolicyModule):
    """Search for the parameters of a policy, in which each training step plays the episodes of one proposal.

    In checkpoints and held-out episodes the policy has the best parameters so far.

    Args:
        policy: policy whose parameters are searched.
        searcher: searcher that proposes parameters.
    """

    run_data: SearchDataModule | None
    policy: SearchedPolicy

    def __init__(self, policy: SearchedPolicy, searcher: Searcher) -> None:
        super().__init__(policy)
        self.searcher = searcher
        self.automatic_optimization = False
        self.trials: list[dict[str, Any]] = []
        """All policies in the order in which they were played: ``iteration`` (from 1; at most 0 for warm-up policies),
        ``parameters``, ``returns``, ``env_steps``, and the ``replies`` of a language model."""
        self.best = -1
        """Index of the best trial; -1 before the first."""
        self._envs: VectorEnv | None = None
        self._proposed: tuple[np.ndarray, float] | None = None
        self._state_before: dict[str, Any] | None = None
        """State of the searcher before the proposal that is in progress; None if there is none."""

    def training_step(self, index: int) -> None:
        """Play the policy of an index: a proposal, or a warm-up policy if the index is negative."""
        data = self._data
        # A run that resumes within an epoch does not call on_train_epoch_start, which proposes otherwise.
        (parameters, seconds), self._proposed = self._proposed or self._propose(index), None
        started = time.monotonic()
        if self._envs is None:
            self._envs = make_batched(data.env, data.num_rollouts)
        episodes, trajectory = proposal_seeds(data.seed, index, data.num_rollouts), self.searcher.needs_trajectory
        trial = play_parameters(self.policy, self._envs, parameters, episodes, data.max_steps, trajectory)
        self.searcher.tell(trial)
        costs = dict(self.searcher.metrics) if index >= 0 else {}
        self._keep(trial, index)
        tokens = costs.get("prompt_tokens", 0) + costs.get("completion_tokens", 0)
        data.tick(trial.env_steps, len(trial.returns), tokens)
        self._record(trial, costs | {"proposal_seconds": seconds}, time.monotonic() - started)
        self.count_update()

    def _propose(self, index: int) -> tuple[np.ndarray, float]:
        """Return the parameters ``(parameter,)`` of an index, and the duration of the proposal in seconds.

        If a proposal fails, its replies are saved.
        """
        started = time.monotonic()
        if index < 0:
            rng = np.random.default_rng(int(seeds("warm-up", self._data.seed, index)))
            return self.policy.parameter_space().sample(rng), time.monotonic() - started
        try:
            self._state_before = self.searcher.state_dict()
            parameters = self.interruption.attempt(self._ask)
            self._state_before = None
        except Exception:
            self._keep_replies(index)
            self._log_usage()
            raise
        return parameters, time.monotonic() - started

    def _ask(self) -> np.ndarray:
        """Return the next proposal; a signal can interrupt a request to a language model."""
        with self.interruption.abandonable():
            return self.searcher.ask()

    def _keep_replies(self, index: int) -> None:
        """Add the replies of a proposal that ends the run to ``proposals.jsonl``, in a line without parameters."""
        if not self.searcher.replies:
            return
        line = {"iteration": index + 1, "parameters": None, "returns": [], "env_steps": 0}
        file = Path(self.trainer.default_root_dir) / "proposals.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with appending("a proposal", file), file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line | {"replies": list(self.searcher.replies)}, ensure_ascii=False) + "\n")
        logging.getLogger("lrl").warning("the replies to proposal %d are the last line of %s", index + 1, file)

    def _log_usage(self) -> None:
        """Log the number of requests to a server in the whole search, and their costs."""
        if "requests" in self.searcher.usage:
            logging.getLogger("lrl").info("asked in the whole search: %s", requests_line(self.searcher.usage))

    def _keep(self, trial: Trial, index: int) -> None:
        """Add a trial, and set the parameters of the policy if it is the best."""
        better = self.best < 0 or trial.value > self.best_return
        self.trials.append(
            {
                "iteration": index + 1,
                "parameters": trial.parameters.tolist(),
                "returns": trial.returns.tolist(),
                "env_steps": int(trial.env_steps),
                "replies": list(self.searcher.replies) if index >= 0 else [],
            }
        )
        if better:
            self.best = len(self.trials) - 1
            self.policy.load_parameters(trial.parameters)

    @property
    def best_return(self) -> float:
        """Mean return of the best policy so far on the episodes that selected it."""
        return float(np.mean(self.trials[self.best]["returns"]))

    def _record(self, trial: Trial, costs: dict[str, float], seconds: float) -> None:
        """Record the returns, the best return so far, and the costs of the proposal."""
        self.record("rollout/return", torch.from_numpy(trial.returns))
        self.record("rollout/length", torch.tensor(trial.env_steps / len(trial.returns)))
        self.record("search/best_return", torch.tensor(self.best_return, dtype=torch.float64))
        for name, value in costs.items():
            self.record(f"search/{name}", torch.tensor(float(value)))
        self.record("throughput/env_steps_per_second", torch.tensor(trial.env_steps / max(seconds, 1e-9)))

    @property
    def _data(self) -> SearchDataModule:
        assert self.run_data is not None, "setup() must be called before"
        return self.run_data

    @property
    def max_collections(self) -> int | None:
        """Number of policies in the whole search, one per collection; None before the data module is known."""
        data = getattr(self.trainer, "datamodule", None) if self._trainer else None
        return data.num_policies if isinstance(data, SearchDataModule) else None

    def setup(self, stage: str) -> None:
        """Connect the policy, and start the search.

        Raises:
            ValueError: If the data module is not a SearchDataModule, if there are several devices, or if the precision
                is less than 32 bits.
        """
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, SearchDataModule):
            raise ValueError(
                f"data is a {type(data).__name__}; it must be a SearchDataModule for {type(self).__name__}."
            )
        if self.trainer.world_size > 1:
            raise ValueError(f"trainer.devices is {self.trainer.world_size}; it must be 1 for a search.")
        precision = str(self.trainer.precision)
        if not precision.startswith(("32", "64")):
            raise ValueError(
                f"trainer.precision is {precision}, which would round the parameters that the searcher proposes; it "
                "must be 32-true or 64-true."
            )
        super().setup(stage)
        if stage != "fit":
            return
        epochs = self.trainer.max_epochs
        if epochs is not None and 0 <= epochs < data.num_policies:
            sentence = "trainer.max_epochs is %d, which ends the search early: it plays %d policies"
            logging.getLogger("lrl").warning(sentence, epochs, data.num_policies)
        self.searcher.describe(*task_in_words(self.policy, data.env, data.max_steps))
        self.searcher.setup(self.policy.parameter_space(), data.seed, data.num_iterations)

    def configure_optimizers(self) -> list[Any]:
        """Return an empty list, because no optimizer is used."""
        return []

    def on_train_start(self) -> None:
        """End a run that is resumed after the last proposal was logged and validated."""
        if not self.trainer.fit_loop.restarted_mid_epoch:
            self._end_if_finished()

    def on_train_end(self) -> None:
        """Log the requests of the search."""
        self._log_usage()

    def on_train_epoch_start(self) -> None:
        """Make the proposal of this epoch, and schedule a validation after the last proposal.

        A checkpoint that is written here lies between two epochs, so that a signal can interrupt the proposal.
        """
        data = self._data
        last = data.played + 1 >= data.num_policies
        if last and self.trainer.check_val_every_n_epoch is not None:
            self.trainer.check_val_every_n_epoch = 1
        if not data.finished:
            self._proposed = self._propose(data.played - data.warmup)

    def on_train_epoch_end(self) -> None:
        """Log the metrics of this policy, and end the run after the last one."""
        super().on_train_epoch_end()
        self._end_if_finished()

    def _end_if_finished(self) -> None:
        if self._data.finished:
            self.trainer.should_stop = True

    def teardown(self, stage: str) -> None:
        """Close the environments."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the trials and the state of the searcher."""
        super().on_save_checkpoint(checkpoint)
        searcher = self.searcher.state_dict()
        if self._state_before is not None:  # a resumed run repeats the proposal, but its costs so far are counted
            searcher = self._state_before | {name: searcher[name] for name in ("usage",) if name in searcher}
        state = {"kind": type(self.searcher).__name__, "searcher": searcher}
        checkpoint["lrl"]["search"] = {"trials": self.trials, "best": self.best} | state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the trials and the searcher.

        Raises:
            ValueError: If the checkpoint contains no search, or a search with another searcher or other settings.
        """
        super().on_load_checkpoint(checkpoint)
        if self.trainer.state.fn != "fit":
            return
        saved = checkpoint["lrl"].get("search")
        if saved is None:
            raise ValueError("the checkpoint contains no search; give a run of PromptedSearchModule.")
        kind = type(self.searcher).__name__
        if saved["kind"] != kind:
            raise ValueError(
                f"model.searcher is a {kind}, in the checkpoint it was a {saved['kind']}; resume with the same."
            )
        self.trials, self.best = list(saved["trials"]), int(saved["best"])
        self.searcher.load_state_dict(saved["searcher"])
