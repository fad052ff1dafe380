"""Demonstrations from Minari data sets: which data set, which of its episodes, and how they are shown."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from lrl.codecs.clipping import clip_to_space
from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.data.demonstrations.augmentation import Augmentation
from lrl.data.demonstrations.minari_turns import MinariTurns, NativeTurns, TextTurns
from lrl.data.demonstrations.sources import Demonstrations, Reasoning
from lrl.data.episode_selection import EpisodeSelection, Split
from lrl.envs.factory import EnvFactory
from lrl.envs.minari_reader import DatasetReader, download
from lrl.policies.policy import Policy
from lrl.ranges import HalfOpenUnitInterval, PositiveInt, check_arguments


class MinariDemonstrations(Demonstrations):
    """Demonstrates the actions of a Minari data set, each with the prompt that the environment would have shown.

    A data set holds native observations and actions, from which a policy that acts natively learns; for one that
    responds in text the environment's codec writes them as text, and the prompt's history is that of the episode.
    Episodes are read lazily. Random actions that were inserted while collecting
    (``collect.py --random_share``) are not demonstrated but are part of the history. With ``advised`` the action that
    the policy would have chosen instead is demonstrated, which covers states that mistakes lead to. Of a data set with
    an advisor (``collect.py --advisor``) only the advised actions are demonstrated (DAgger, arXiv:1011.0686).

    Args:
        dataset_id: Minari's name of the data set, which is downloaded if it is not local.
        split: ``train`` and ``validation`` have no episode in common; ``all`` uses both.
        validation_share: fraction of episodes in the validation split, at least one of two or more.
        num_episodes: number of episodes of the split to use; null uses all. A larger number adds to the same episodes.
        num_rows: number of steps of the split to use, of whole episodes except the last; null uses all.
        min_return: lowest undiscounted return of the episodes to use; null uses all.
        reasoning: templates of the text before the action, for response formats that ask for one; one is sampled per
            response, ``{seen}`` is replaced by the codec's summary of the observation, ``{ahead}`` by what stands
            directly ahead (BabyAI only), ``{action}`` by the action.
        copies: number of copies of each episode; the first is unchanged, ``augmentation`` transforms the others.
        augmentation: how the other copies are changed; null if ``copies`` is 1.
        advised: whether to demonstrate the actions that were advised where others were taken.
        seed: seed of the split, the selection, the reasoning and the augmentation.
    """

    has_native_turns = True

    def __init__(
        self,
        dataset_id: str,
        split: Split = "train",
        validation_share: HalfOpenUnitInterval = 0.1,
        num_episodes: PositiveInt | None = None,
        num_rows: PositiveInt | None = None,
        min_return: float | None = None,
        reasoning: Sequence[str] = ("I see {seen}, I choose",),
        copies: PositiveInt = 1,
        augmentation: Augmentation | None = None,
        advised: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(MinariDemonstrations.__init__, locals(), "demonstrations")
        if (augmentation is None) != (copies == 1):
            given = "null" if augmentation is None else type(augmentation).__name__
            raise ValueError(
                f"demonstrations.copies is {copies} and augmentation {given}; it must be null with one copy, and only "
                "then."
            )
        self.dataset_id, self.seed, self.reasoning = dataset_id, seed, Reasoning(reasoning)
        self.selection = EpisodeSelection(
            key="demonstrations",
            split=split,
            validation_share=validation_share,
            num_episodes=num_episodes,
            num_rows=num_rows,
            min_return=min_return,
            seed=seed,
        )
        self.copies, self.augmentation, self.advised = copies, augmentation, advised
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
            ValueError: a space differs, the augmentation is not for such actions, or the data set is missing, empty or
                damaged.
        """
        self.reader.check_spaces(*env.spaces, "demonstrations.dataset_id")
        if self.augmentation is not None:
            self.augmentation.connect(env.spaces[1])

    def load(self, codec: TextCodec, policy: Policy) -> MinariTurns:
        """Return the selected steps as a lazy sequence, native if the policy acts natively.

        Raises:
            ValueError: the data set is missing, empty, damaged or too small, or the codec cannot write it as text.
        """
        if self.advised:
            self._check_advice(codec)
        kind = NativeTurns if policy.response_format is None else TextTurns
        turns = kind(self, codec, policy, *self._select())
        turns[0]  # reports errors that all episodes have
        return turns

    def _check_advice(self, codec: TextCodec) -> None:
        """Raise if the text of an advised action is none of the codec's; log how many are out of bounds."""
        clipped: dict[str, int] = {}
        total = 0
        for index in range(len(self.reader.lengths)):
            for step, text in self.reader.advised_actions(index).items():
                try:
                    if text not in clipped:
                        action = codec.text_to_action(text)
                        clipped[text] = clip_to_space(self.reader.action_space, action)[1] or 0
                    total += clipped[text] > 0
                except InvalidActionError as error:
                    raise ValueError(
                        f"demonstrations.dataset_id is {self.dataset_id!r}, whose episode {index} has {text!r} as the "
                        f"advised action of step {step}; {error}."
                    ) from error
        if total:
            logging.getLogger("lrl").warning(
                "dataset_id is %r: %d advised actions are out of the bounds of %s and are clipped.",
                *(self.dataset_id, total, self.reader.action_space),
            )

    def check_held_out(self, training: Demonstrations) -> None:
        """Raise if the training demonstrations include some of these episodes.

        Raises:
            ValueError: both are of one data set, and an episode is in both.
        """
        for source in training.sources:
            if not (isinstance(source, MinariDemonstrations) and source.dataset_id == self.dataset_id):
                continue
            shared = np.intersect1d(self._select()[0], source._select()[0])
            if len(shared):
                raise ValueError(
                    f"data.validation_demonstrations have {len(shared)} episodes of {self.dataset_id!r} in common with "
                    "data.demonstrations; their splits must be validation and train, with one seed and one "
                    "validation_share."
                )

    def _select(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected episodes and their numbers of steps, each int64 ``(episode,)``."""
        reader = self.reader
        if self.advised and not reader.has_advice:
            raise ValueError(
                f"demonstrations.advised is true, but {self.dataset_id!r} holds no advice; it must be false, or the "
                "data set collected with --advisor, or with --random_share by a policy that responds in text or whose "
                "actions have names."
            )
        counts = reader.num_demonstrated(self.advised)
        if not self.advised and reader.has_advisor:
            raise ValueError(
                f"demonstrations.advised is false, but {self.dataset_id!r} was collected with --advisor, so that only "
                "its advised actions are demonstrations; it must be true."
            )
        return self.selection.select(reader, counts)
