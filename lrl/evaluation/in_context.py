"""The search of a language model that learned to search, as ``lrl search_table`` plays it on the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, final

import numpy as np

from lrl.evaluation.policy_chat import PolicyChatModel
from lrl.models.chat import ChatModel
from lrl.search.prompted import PromptedSearcher
from lrl.search.random_search import RandomSearch
from lrl.search.searcher import Searcher, Trial
from lrl.search.space import ParameterSpace
from lrl.search.teaching import TeacherConfig
from lrl.types import SamplingConfig

_TOKENS = 8
"""Maximum number of tokens of a reply, which is an integer below 1000."""


class UnplayableError(ValueError):
    """Says that a language model cannot search in a space, because not even one policy fits in its prompt."""


@final
class InContextSearcher(Searcher):
    """Proposes random policies at first, and then what a language model that learned to search replies to the history.

    The prompt is that of the model's training. Where no reply can be used, a random policy is proposed. Proposals are
    random until two of them have different returns: where a reward is rare, a history of equal returns says nothing.

    Args:
        chat_model: a model that learned from :class:`~lrl.data.demonstrations.synthetic.SyntheticHistories`.
        warmup: least number of random policies, those that random search with the same seed begins with; they are
            proposals like all others. Parameters that somebody else has played (:meth:`tell` without :meth:`ask`) are
            part of the history, but no proposals: a prompt does not count them.
        temperature: of the replies.
    """

    def __init__(self, chat_model: ChatModel, warmup: int = 5, temperature: float = 1.0) -> None:
        self.chat_model, self.warmup, self.temperature = chat_model, warmup, temperature

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search.

        Raises:
            UnplayableError: a prompt with one policy of this space and a reply do not fit in the model.
        """
        super().setup(space, seed, num_iterations)
        self._num_asked = 0
        self._random = RandomSearch()
        self._random.setup(space, seed, num_iterations)
        sampling = SamplingConfig(temperature=self.temperature, max_new_tokens=_TOKENS)
        history = TeacherConfig().history
        self._model = PromptedSearcher(self.chat_model, history=history, sampling=sampling, on_failure="random")
        try:
            self._model.setup(space, seed, max(1, num_iterations - self.warmup))
        except ValueError as error:
            raise UnplayableError(str(error)) from error

    @property
    def _proposing(self) -> Searcher:
        told = self._model.entries
        different = len({round(entry.value, 9) for entry in told}) > 1
        return self._model if len(told) >= self.warmup and different else self._random

    @property
    def is_random(self) -> bool:
        """Return whether the next proposal is random because returns are too few, or equal."""
        return self._proposing is self._random

    @property
    def metrics(self) -> Mapping[str, float]:
        """Cost of the last reply; ``failed`` is 1 where a random policy was proposed for want of a usable one."""
        return self._model.metrics

    @property
    def replies(self) -> list[dict[str, str]]:
        """The replies to the last proposal."""
        return self._model.replies

    def ask(self) -> np.ndarray:
        """Return the next proposal."""
        proposal = self._proposing.ask()
        self._num_asked += 1
        return proposal

    def tell(self, trial: Trial) -> None:
        """Add a trial to the history."""
        self._random.tell(trial)
        self._model.tell(trial)
        # As in demonstrations, the first proposal after the warm-up has number 1, and random ones count as well.
        self._model.asked = max(0, self._num_asked - self.warmup)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both searchers."""
        return {"asked": self._num_asked, "random": self._random.state_dict(), "model": self._model.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._num_asked = int(state_dict["asked"])
        self._random.load_state_dict(state_dict["random"])
        self._model.load_state_dict(state_dict["model"])


@lru_cache(maxsize=1)
def chat_model_of(checkpoint: str) -> PolicyChatModel:
    """Return the text policy of a checkpoint as a chat model, loaded once in a process.

    Raises:
        ValueError: there is no such checkpoint, or it holds another policy.
    """
    chat_model = PolicyChatModel(checkpoint)
    chat_model.key = "--checkpoint"
    chat_model.connect()  # now, so that a missing checkpoint is not taken for a task that is too large
    return chat_model
