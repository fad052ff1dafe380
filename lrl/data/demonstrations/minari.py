"""Demonstrations from Minari data sets: which data set, which of its episodes, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.augmentation import Symmetry
from lrl.data.demonstrations.minari_turns import MinariTurns, NativeTurns, TextTurns
from lrl.data.demonstrations.sources import Demonstrations, Reasoning
from lrl.data.minari_spaces import spaces_match
from lrl.data.minari_storage import DatasetReader, download
from lrl.envs.factory import EnvFactory
from lrl.functional.random import permutation
from lrl.policies.policy import Policy
from lrl.ranges import HalfOpenUnitInterval, PositiveInt, check_arguments


class MinariDemonstrations(Demonstrations):
    """Demonstrates the actions of a Minari data set, each with the prompt that the environment would have shown.

    A data set holds native observations and actions, from which a policy that acts natively learns; for one that
    responds in text the environment's codec writes them as text, and the prompt's history is that of the episode.
    Episodes are read lazily. Random actions that were inserted while collecting
    (``collect.py --random_share``) are not demonstrated but are part of the history. With ``advised`` the action that
    the policy would have chosen instead is demonstrated, which covers states that mistakes lead to (as in DAgger,
    arXiv:1011.0686).

    Args:
        dataset_id: Minari's name of the data set, which is downloaded if it is not local.
        split: ``train`` and ``validation`` have no episode in common; ``all`` uses both.
        validation_share: fraction of episodes in the validation split, at least one of two or more.
        num_episodes: number of episodes of the split to use; null uses all. A larger number adds to the same episodes.
        num_rows: number of steps of the split to use, of whole episodes except the last; null uses all.
        min_return: undiscounted return that an episode of the split must reach to be used; null uses all.
        reasoning: templates of the text before the action, for response formats that ask for one; one is sampled per
            response, ``{seen}`` is replaced by the codec's summary of the observation, ``{action}`` by the action.
        copies: number of copies of each episode; the first is unchanged, ``symmetry`` transforms the others.
        symmetry: augmentation of the other copies; null if ``copies`` is 1.
        advised: whether to demonstrate also the actions that were advised where a random action was taken.
        seed: seed of the split, the selection, the reasoning and the augmentation.
    """

    has_native_turns = True

    def __init__(
        self,
        dataset_id: str,
        split: Literal["train", "validation", "all"] = "train",
        validation_share: HalfOpenUnitInterval = 0.1,
        num_episodes: PositiveInt | None = None,
        num_rows: PositiveInt | None = None,
        min_return: float | None = None,
        reasoning: Sequence[str] = ("I see {seen}, I choose",),
        copies: PositiveInt = 1,
        symmetry: Symmetry | None = None,
        advised: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(MinariDemonstrations.__init__, locals(), "demonstrations")
        if (symmetry is None) != (copies == 1):
            given = "null" if symmetry is None else type(symmetry).__name__
            raise ValueError(
                f"demonstrations.copies is {copies} and symmetry {given}; several copies need a symmetry, one null."
            )
        if num_episodes is not None and num_rows is not None:
            raise ValueError("demonstrations.num_episodes and demonstrations.num_rows are both set; one must be null.")
        self.dataset_id, self.validation_share, self.seed = dataset_id, validation_share, seed
        self.split: Literal["train", "validation", "all"] = split
        self.num_episodes, self.num_rows, self.reasoning = num_episodes, num_rows, Reasoning(reasoning)
        self.copies, self.symmetry, self.advised, self.min_return = copies, symmetry, advised, min_return
        self._reader: DatasetReader | None = None

    def prepare_data(self) -> None:
        """Download the data set if it is not local."""
        download(self.dataset_id)

    @property
    def reader(self) -> DatasetReader:
        """The data set, opened once.

        Raises:
            ValueError: the data set is missing, empty or damaged.
        """
        if self._reader is None:
            self._reader = DatasetReader(self.dataset_id)
        return self._reader

    def validate(self, env: EnvFactory) -> None:
        """Raise if the observation or action space differs from that of the environment.

        Raises:
            ValueError: a space differs, or the data set is missing, empty or damaged.
        """
        native = env.make(1, None)
        native.close()
        for name in ("observation", "action"):
            stored, expected = getattr(self.reader, f"{name}_space"), getattr(native, f"single_{name}_space")
            if not spaces_match(stored, expected):
                raise ValueError(
                    f"demonstrations.dataset_id is {self.dataset_id!r}, whose {name} space is {stored}; it must be "
                    f"that of the environment, {expected}."
                )

    def load(self, codec: TextCodec, policy: Policy) -> MinariTurns:
        """Return the selected steps as a lazy sequence, native if the policy acts natively.

        Raises:
            ValueError: the data set is missing, empty, damaged or too small, or the codec cannot write it as text.
        """
        kind = NativeTurns if policy.response_format is None else TextTurns
        turns = kind(self, codec, policy, *self._select())
        turns[0]  # reports errors that all episodes have
        return turns

    def check_held_out(self, training: Demonstrations) -> None:
        """Raise if the training demonstrations include some of these episodes.

        Raises:
            ValueError: both are of one data set, and an episode is in both.
        """
        if isinstance(training, MinariDemonstrations) and training.dataset_id == self.dataset_id:
            shared = np.intersect1d(self._select()[0], training._select()[0])
            if len(shared):
                raise ValueError(
                    f"data.validation_demonstrations have {len(shared)} episodes of {self.dataset_id!r} in common with "
                    "data.demonstrations; their splits must be validation and train, with one seed and one "
                    "validation_share."
                )

    def _select(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected episodes and their numbers of steps, each int64 ``(episode,)``."""
        counts = self.reader.num_demonstrated(self.advised)
        if self.advised and not any(self.reader.advised_actions(index) for index in range(len(counts))):
            raise ValueError(
                f"demonstrations.advised is true, but {self.dataset_id!r} holds no advice; it must be false, or the "
                "data set collected with --random_share."
            )
        episodes = self._with_min_return(self._split(len(counts)))
        episodes = episodes[counts[episodes] > 0]
        steps = counts[episodes]
        available = {"num_episodes": len(steps), "num_rows": int(steps.sum())}
        above = "" if self.min_return is None else f" with a return of {self.min_return:g} or more"
        for name, count in available.items():
            if (getattr(self, name) or 1) > count:
                raise ValueError(
                    f"demonstrations.{name} is {getattr(self, name)}, but the {self.split} split of "
                    f"{self.dataset_id!r} holds {count}{above}; it must be at most that."
                )
        if self.num_rows is not None:
            steps = np.clip(self.num_rows - (np.cumsum(steps) - steps), 0, steps)
        selected = slice(self.num_episodes) if self.num_rows is None else steps > 0
        return episodes[selected], steps[selected]

    def _with_min_return(self, episodes: np.ndarray) -> np.ndarray:
        """Return those of some episodes, int64 ``(episode,)``, whose return is at least ``min_return``."""
        if self.min_return is None or not len(episodes):
            return episodes
        returns = self.reader.returns[episodes]
        if returns.max() < self.min_return:
            raise ValueError(
                f"demonstrations.min_return is {self.min_return:g}, but the returns in the {self.split} split of "
                f"{self.dataset_id!r} are {returns.min():.6g} to {returns.max():.6g}; it must be at most the greatest."
            )
        return episodes[returns >= self.min_return]

    def _split(self, num_episodes: int) -> np.ndarray:
        """Return the episodes of the split in the order in which they are selected, int64 ``(episode,)``."""
        order = permutation(num_episodes, "split", self.seed)
        held_out = max(round(self.validation_share * num_episodes), int(self.validation_share > 0 and num_episodes > 1))
        return {"all": order, "validation": order[:held_out], "train": order[held_out:]}[self.split]
