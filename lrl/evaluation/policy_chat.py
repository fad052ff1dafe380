"""A chat model that is the text policy of a checkpoint, for models that were trained here to search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from lrl.evaluation.checkpoint import load_policy
from lrl.models.chat import ChatModel, Completion, Message
from lrl.policies.text import TextPolicy
from lrl.types import RandomKeys, SamplingConfig


@final
class PolicyChatModel(ChatModel):
    """Responds as the text policy of a checkpoint does to an observation, with the prompt of its training.

    Args:
        checkpoint: a checkpoint of a :class:`~lrl.policies.text.TextPolicy`, or a run directory.

    Attributes:
        key: what error messages call the checkpoint; a command sets the name of its option.
    """

    key = "chat_model.checkpoint"

    def __init__(self, checkpoint: str) -> None:
        self.name, self._policy = checkpoint, None

    @property
    def policy(self) -> TextPolicy:
        """The policy, loaded when it is first asked.

        Raises:
            ValueError: there is no checkpoint, or it holds another policy.
        """
        if self._policy is None:
            try:
                policy = load_policy(self.name).policy
            except ValueError as error:  # it names the option of the commands
                raise ValueError(str(error).replace("--checkpoint is", f"{self.key} is", 1)) from error
            if not isinstance(policy, TextPolicy):
                raise ValueError(f"{self.key} is {self.name!r}, a {type(policy).__name__}; it must be a TextPolicy.")
            self._policy: TextPolicy | None = policy
        return self._policy

    def connect(self) -> None:
        """Load the policy.

        Raises:
            ValueError: there is no checkpoint, or it holds another policy.
        """
        _ = self.policy

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether the last message fits into the policy's prompt, and its response into the model's context.

        Args:
            conversation: messages, of which the last one is read.
            sampling: has the maximum number of tokens of a response.
            response: a text for which a response must have room, with the token that ends it.
        """
        policy, text = self.policy, conversation[-1]["content"]
        if response and len(policy.encode_response(response)) > sampling.max_new_tokens:
            return False
        assert policy.codec is not None
        model = policy.language_model
        length = len(model.tokenizer.encode_chat(policy.prompt.messages(policy.codec, text, ())))
        context = model.context_length
        has_room = context is None or length + sampling.max_new_tokens <= context
        return length <= policy.trunk.max_prompt_tokens and has_room

    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one response to the last message of each conversation; earlier ones are not read."""
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
