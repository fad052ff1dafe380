"""Lightning data module of a search for the parameters of a small policy."""

from __future__ import annotations

from typing import Any

from lrl.data.run_data import MinibatchLoader, RunDataModule
from lrl.data.validation import ValidationConfig
from lrl.envs.factory import EnvFactory
from lrl.ranges import NonNegativeInt, PositiveInt, check_arguments


class SearchDataModule(RunDataModule):
    """Says which policies of a search are played next, and counts them; one Lightning epoch plays one policy.

    A search plays ``warmup`` random policies and ``num_iterations`` proposals, and ends. ``trainer.max_epochs`` must
    leave room for both.

    Args:
        env: where the policies are played.
        num_iterations: number of proposals.
        num_rollouts: episodes of each policy, the random ones included.
        max_steps: episodes are cut after this many steps; held-out episodes are as long as the environment lets them
            be, which ``env.max_episode_steps`` changes for both.
        warmup: number of random policies that are played first, for the searcher to start from.
        validation: held-out episodes of the best policy so far.
        seed: of everything random in the run.
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
        """Number of policies that were played, the random ones included."""

    @property
    def num_policies(self) -> int:
        """Number of policies that a whole search plays."""
        return self.warmup + self.num_iterations

    @property
    def finished(self) -> bool:
        """Return whether all policies were played."""
        return self.played >= self.num_policies

    def setup(self, stage: str) -> None:
        """Check that the model is a search.

        Raises:
            ValueError: it is not.
        """
        module = None if self.trainer is None else self.trainer.lightning_module
        if module is not None and not hasattr(module, "searcher"):
            raise ValueError(
                f"data is a SearchDataModule, which has nothing for a {type(module).__name__} to train on; the model "
                "must be a PromptedSearchModule."
            )

    def train_dataloader(self) -> MinibatchLoader:
        """Return a loader of one item: the index of the proposal to be played, negative for warm-up policies."""
        return MinibatchLoader(self, lambda: 1, lambda index: self.played - self.warmup)

    def tick(self, env_steps: float, episodes: float, tokens: float) -> None:
        """Count one policy, and advance the clocks by what playing it took."""
        self.played += 1
        self.advance(env_steps=int(env_steps), episodes=int(episodes), tokens=int(tokens))  # of NumPy none is saved

    def state_dict(self) -> dict[str, Any]:
        """Return the clocks and the number of policies that were played."""
        return super().state_dict() | {"played": self.played}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        self.played = int(state_dict["played"])
