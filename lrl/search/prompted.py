"""The searcher that asks a language model for the next parameters (ProPS)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

import numpy as np

from lrl.functional.random import seeds
from lrl.models.chat import ChatModel, Completion
from lrl.ranges import PositiveInt, check_arguments
from lrl.search.history import Entry, HistoryConfig, same_parameters
from lrl.search.integers import from_integers, integer_space
from lrl.search.parsing import ProposalError, parse_parameters
from lrl.search.prompts import SearchPrompt, TaskText
from lrl.search.searcher import Searcher, Trial
from lrl.search.space import ParameterSpace
from lrl.types import SamplingConfig

_METRICS: tuple[str, ...] = (
    *("prompt_tokens", "completion_tokens", "cached", "prompt_characters", "retries", "duplicates", "failed"),
)


@final
class PromptedSearcher(Searcher):
    """Shows a language model the parameters and mean returns so far, and proposes what it replies.

    A reply that cannot be used is asked for again, with the reason in the prompt. Each request has its own seed, which
    follows from the seed of the search and the number of the proposal and of the try.

    Args:
        chat_model: writes the replies.
        prompt: what the model is told besides the history.
        history: which policies it is shown.
        sampling: temperature and maximum length of a reply.
        max_tries: number of replies to a proposal before it counts as failed.
        on_failure: after ``max_tries`` unusable replies, ``stop`` raises and ``random`` proposes a random policy.
        allow_repeats: whether parameters that were tried before may be proposed again.
    """

    def __init__(
        self,
        chat_model: ChatModel,
        prompt: SearchPrompt = SearchPrompt(),
        history: HistoryConfig = HistoryConfig(),
        sampling: SamplingConfig = SamplingConfig(max_new_tokens=1024),
        max_tries: PositiveInt = 10,
        on_failure: Literal["stop", "random"] = "stop",
        allow_repeats: bool = False,
    ) -> None:
        check_arguments(PromptedSearcher.__init__, locals(), "searcher")
        self.chat_model, self.prompt, self.history, self.sampling = chat_model, prompt, history, sampling
        self.max_tries, self.on_failure, self.allow_repeats = int(max_tries), on_failure, allow_repeats
        self.entries: list[Entry] = []
        """All policies so far, oldest first."""
        self._task, self._asked = TaskText(), 0
        self._metrics: dict[str, float] = {}
        self._replies: list[dict[str, str]] = []

    @property
    def needs_trajectory(self) -> bool:
        """Return whether the prompt shows episodes."""
        return self.history.trajectories > 0

    def describe(self, environment: str, policy: str) -> None:
        """Take the words for the environment and the policy, which ProPS+ shows."""
        self._task = TaskText(environment=environment, policy=policy)

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search with an empty history.

        Raises:
            ValueError: the parameters cannot be written as integers, and ``history.style`` asks for that.
        """
        if self.history.style == "integers":
            integer_space(space)
        super().setup(space, seed, num_iterations)
        self.entries, self._asked = [], 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Tokens, retries and rejected duplicates of the last proposal."""
        return self._metrics

    @property
    def replies(self) -> list[dict[str, str]]:
        """The replies to the last proposal, each with the reason why it was rejected; empty for the last one."""
        return self._replies

    def ask(self) -> np.ndarray:
        """Return what the model proposes, rounded to the decimals of the space.

        Raises:
            ValueError: no reply could be used, or the model cannot be reached.
        """
        self._metrics, self._replies, complaint = dict.fromkeys(_METRICS, 0.0), [], ""
        for attempt in range(self.max_tries):
            text, cut = self._request(attempt, complaint)
            try:
                proposal = self._accept(text, cut)
            except ProposalError as error:
                complaint = str(error)
                self._replies.append({"reply": text, "rejected": complaint})
                self._metrics["retries"] += 1
            else:
                self._replies.append({"reply": text, "rejected": ""})
                self._asked += 1
                return proposal
        return self._give_up(complaint)

    def _request(self, attempt: int, complaint: str) -> tuple[str, bool]:
        """Ask once; return the reply and whether it was cut."""
        conversation = self.prompt.render(
            space=self.space,
            task=self._task,
            history=self.history.render(self.entries, self.space),
            order=self.history.order,
            style=self.history.style,
            iteration=self._asked + 1,
            total=self.num_iterations,
            complaint=complaint,
            allow_repeats=self.allow_repeats,
        )
        seed = int(seeds("prompted search", self.seed, self._asked, attempt))
        (completion,) = self.chat_model.complete([conversation], self.sampling, [seed])
        self._count(completion, sum(len(message["content"]) for message in conversation))
        return completion.text, completion.finish_reason == "length"

    def _count(self, completion: Completion, characters: int) -> None:
        self._metrics["prompt_tokens"] += completion.prompt_tokens
        self._metrics["completion_tokens"] += completion.completion_tokens
        self._metrics["cached"] += completion.cached
        self._metrics["prompt_characters"] += characters

    def _accept(self, text: str, cut: bool) -> np.ndarray:
        """Return the proposal in a reply.

        Raises:
            ProposalError: it cannot be used.
        """
        if self.history.style == "integers":
            proposal = from_integers(parse_parameters(text, integer_space(self.space), cut), self.space)
        else:
            proposal = self.space.nearest(np.array(parse_parameters(text, self.space, cut)))
        before = None if self.allow_repeats else same_parameters(self.entries, proposal)
        if before is not None:
            self._metrics["duplicates"] += 1
            raise ProposalError(f"These parameters were tried before, with f(params) {before.value:.2f}.")
        return proposal

    def _give_up(self, complaint: str) -> np.ndarray:
        """Return a random policy, or raise: the model has used up its tries."""
        if self.on_failure == "stop":
            raise ValueError(
                f"{self.chat_model.name} gave no usable proposal {self._asked + 1} in searcher.max_tries "
                f"{self.max_tries} replies; the last was rejected because: {complaint}"
            )
        self._metrics["failed"] = 1.0
        rng = np.random.default_rng(int(seeds("failed proposal", self.seed, self._asked)))
        self._asked += 1
        return self.space.sample(rng)

    def tell(self, trial: Trial) -> None:
        """Add a trial to the history."""
        steps = self.history.trajectory_steps if self.needs_trajectory else 0
        self.entries.append(Entry.of(trial, steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the number of proposals."""
        return {"asked": self._asked, "entries": [entry.state() for entry in self.entries]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._asked = int(state_dict["asked"])
        self.entries = [Entry.restored(entry) for entry in state_dict["entries"]]
