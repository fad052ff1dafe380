"""Search by a language model that was trained to search; ``lrl search_table`` runs it on the tasks of ProPS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np

from lrl.chat.model import ChatModel, Completion, Message
from lrl.evaluation.load import load_policy
from lrl.policies.text import TextPolicy
from lrl.registry import register
from lrl.search.prompted import PromptedSearcher
from lrl.search.searchers import ParameterSpace, RandomSearch, Searcher, Trial
from lrl.search.synthetic import HISTORY
from lrl.types import RandomKeys, SamplingConfig


@register
@final
class PolicyChatModel(ChatModel):
    """Chat model that responds with the text policy of a checkpoint, in the prompt format of its training.

    Args:
        checkpoint: checkpoint of a :class:`~lrl.policies.text.TextPolicy`, or a run directory.

    Attributes:
        key: name of the setting in error messages.
    """

    key = "chat_model.checkpoint"

    def __init__(self, checkpoint: str) -> None:
        self.name = checkpoint

    @cached_property
    def policy(self) -> TextPolicy:
        """The policy, which is loaded at the first access.

        Raises:
            ValueError: If the checkpoint does not exist, or contains another kind of policy.
        """
        try:
            policy = load_policy(self.name).policy
        except ValueError as error:  # it names the checkpoint by another key
            raise ValueError(str(error).replace("checkpoint is", f"{self.key} is", 1)) from error
        if not isinstance(policy, TextPolicy):
            raise ValueError(f"{self.key} is {self.name!r}, a {type(policy).__name__}; it must be a TextPolicy.")
        return policy

    def connect(self) -> None:
        """Load the policy.

        Raises:
            ValueError: If the checkpoint does not exist, or contains another kind of policy.
        """
        _ = self.policy

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether the last message fits into the policy's prompt, and a response into the model's context.

        Args:
            conversation: messages, of which only the last one is used.
            sampling: sampling settings, which limit the number of tokens of a response.
            response: text that must fit into a response together with its end token.
        """
        policy, text = self.policy, conversation[-1]["content"]
        if response and len(policy.encode_response(response)) > sampling.max_new_tokens:
            return False
        assert policy.codec is not None
        model = policy.language_model
        length = len(model.tokenizer.encode_chat(policy.prompt.messages(policy.codec, text, ())))
        context = math.inf if model.context_length is None else model.context_length
        return length <= policy.trunk.max_prompt_tokens and length + sampling.max_new_tokens <= context

    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one response to the last message of each conversation; earlier messages are ignored."""
        texts, seeded = [messages[-1]["content"] for messages in conversations], np.asarray(seeds, dtype=np.int64)
        keys = RandomKeys(seed=0, purpose="chat", collection=0, env=seeded, turn=np.zeros_like(seeded))
        decisions = self.policy.act(texts, [()] * len(texts), keys, sampling)
        tokenizer, stop_text = self.policy.language_model.tokenizer, self.policy.stop_text
        responses, completions = decisions.inputs["response_ids"].tolist(), []
        lengths = decisions.response_mask.sum(-1).tolist()
        for text, prompt, ids, length in zip(decisions.actions, texts, responses, lengths, strict=True):
            cut = length == sampling.max_new_tokens and not tokenizer.ends(ids[:length], stop_text)
            completions.append(
                Completion(
                    text=str(text),
                    finish_reason="length" if cut else "stop",
                    prompt_tokens=len(self.policy.encode(prompt, ())),
                    completion_tokens=length,
                )
            )
        return completions


_TOKENS = 8
"""Maximum number of tokens of a reply, which is an integer below 1000."""


class UnplayableError(ValueError):
    """Raised if a space is too large for a language model: not even one policy fits into its prompt."""


@register
@final
class InContextSearcher(Searcher):
    """Searcher that proposes random policies first, then the replies of a language model that was trained to search.

    The prompt has the format of the model's training. If no reply is usable, a random policy is proposed. Proposals are
    random until two of them have different returns, because a history of equal returns contains no information.

    Args:
        chat_model: model that was trained on :class:`~lrl.search.synthetic.SyntheticHistories`.
        warmup: minimum number of random proposals at the beginning, which are the first proposals of random search with
            the same seed. Policies that the searcher did not propose (:meth:`tell` without :meth:`ask`) are part of the
            history, but do not count as proposals.
    """

    def __init__(self, chat_model: ChatModel, warmup: int = 5) -> None:
        self.chat_model, self.warmup = chat_model, warmup

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search.

        Raises:
            UnplayableError: If a prompt with one policy of this space and a reply do not fit into the model's context.
        """
        super().setup(space, seed, num_iterations)
        self._num_asked = 0
        self._random = RandomSearch()
        self._random.setup(space, seed, num_iterations)
        sampling = SamplingConfig(temperature=1.0, max_new_tokens=_TOKENS)
        self._model = PromptedSearcher(self.chat_model, history=HISTORY, sampling=sampling, on_failure="random")
        try:
            self._model.setup(space, seed, max(1, num_iterations - self.warmup))
        except ValueError as error:
            raise UnplayableError(str(error)) from error

    @property
    def _proposing(self) -> Searcher:
        trials = self._model.entries
        different = len({round(entry.value, 9) for entry in trials}) > 1
        return self._model if len(trials) >= self.warmup and different else self._random

    @property
    def is_random(self) -> bool:
        """True if the next proposal is random, because there are too few returns or all are equal."""
        return self._proposing is self._random

    def ask(self) -> np.ndarray:
        """Return the next proposal."""
        proposal = self._proposing.ask()
        self.metrics, self.replies = self._model.metrics, self._model.replies
        self._num_asked += 1
        return proposal

    def tell(self, trial: Trial) -> None:
        """Add a trial to the history."""
        self._random.tell(trial)
        self._model.tell(trial)
        # As in demonstrations, proposals are counted from the end of the warm-up, including random ones.
        self._model.asked = max(0, self._num_asked - self.warmup)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both searchers."""
        return {"asked": self._num_asked, "random": self._random.state_dict(), "model": self._model.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._num_asked = int(state_dict["asked"])
        self._random.load_state_dict(state_dict["random"])
        self._model.load_state_dict(state_dict["model"])


@lru_cache(maxsize=1)
def chat_model_of(checkpoint: str) -> PolicyChatModel:
    """Return the text policy of a checkpoint as a chat model, which is loaded once per process.

    Raises:
        ValueError: If the checkpoint does not exist, or contains another kind of policy.
    """
    # The model is loaded here, so that an error about the checkpoint is not reported as a task that is too large.
    chat_model = PolicyChatModel(checkpoint)
    chat_model.key = "checkpoint"
    chat_model.connect()
    return chat_model
