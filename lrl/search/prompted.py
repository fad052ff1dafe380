"""Searcher whose parameters are proposed by a language model (ProPS), and the parser of the model's replies."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, final

import numpy as np

from lrl.chat.model import ChatModel, Completion, ConversationTooLongError, Message
from lrl.functional.random import seeds
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.search.prompts import (
    Entry,
    HistoryConfig,
    ProposalError,
    SearchPrompt,
    integer_space,
    read_integers,
    render_reply,
    same_parameters,
)
from lrl.search.searchers import ParameterSpace, Searcher, Trial
from lrl.types import SamplingConfig

_METRICS = (
    *("prompt_tokens", "completion_tokens", "cached", "prompt_characters", "retries", "duplicates", "failed", "shown"),
)
"""Names of the metrics of every proposal."""
_SHORTER = 0.8
"""Length of the next prompt as a fraction of a prompt that was too long."""
_COST_METRICS = {"requests": "requests", "retries": "request_retries", "cost": "cost"}
"""Names of metrics, by the name of the count in the report of a chat model."""


@register
@final
class PromptedSearcher(Searcher):
    """Searcher that prompts a language model with all parameters and mean returns so far, and proposes its reply.

    If a reply is unusable, the request is repeated with the reason in the prompt. The seed of a request depends on the
    seed of the search, the number of the proposal and the number of the attempt. If a request at temperature 0 would be
    repeated without a change, it is sampled at temperature 1 instead.

    In style ``integers`` each parameter has its own prompt and reply; all are requested at once, and prompts contain no
    reason for a rejection.

    If the policies of ``history`` do not fit into the model's context, the worst (order ``value``) or the oldest (order
    ``time``) are left out, but never the best. A server whose limit is unknown may reject a prompt as too long; then
    prompts are at most 0.8 times as long for the rest of the search.

    Args:
        chat_model: model that writes the replies.
        prompt: configuration of the prompt besides the history.
        history: configuration of the policies in the prompt.
        sampling: temperature and maximum length of a reply.
        max_tries: maximum number of replies for one proposal.
        on_failure: what happens after ``max_tries`` unusable replies: ``stop`` raises an error, ``random`` proposes a
            random policy.
    """

    def __init__(
        self,
        chat_model: ChatModel,
        prompt: SearchPrompt = SearchPrompt(),
        history: HistoryConfig = HistoryConfig(),
        sampling: SamplingConfig = SamplingConfig(max_new_tokens=1024),
        max_tries: PositiveInt = 10,
        on_failure: Literal["stop", "random"] = "stop",
    ) -> None:
        check_arguments(PromptedSearcher.__init__, locals(), "searcher")
        self.chat_model, self.prompt, self.history, self.sampling = chat_model, prompt, history, sampling
        self.max_tries, self.on_failure = int(max_tries), on_failure
        if history.style == "integers" and prompt != SearchPrompt():
            raise ValueError(
                f"searcher.prompt is {prompt}, but history.style is integers, whose prompts contain the history only; "
                "leave searcher.prompt out."
            )
        self.needs_trajectory = history.trajectories > 0
        self.entries: list[Entry] = []
        """All policies so far, the oldest first."""
        self.asked = 0
        """Number of proposals so far, which determines the seeds of requests."""
        self.replies, self.metrics, self.usage = list[dict[str, str]](), dict[str, float](), dict[str, float]()
        self._task, self._warned = ("", ""), False
        self._most_characters: int | None = None
        """Maximum length of a prompt; None until the chat model has rejected a prompt as too long."""

    def describe(self, environment: str, policy: str) -> None:
        """Set the descriptions of the environment and the policy, which the prompt of ProPS+ contains."""
        self._task = (environment, policy)

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search with an empty history.

        Raises:
            ValueError: If the parameters cannot be written as integers in style ``integers``, if the chat model is not
                available, or if a prompt with one policy or a reply with one proposal is too long for it.
        """
        if self.history.style == "integers":
            integer_space(space)
        super().setup(space, seed, num_iterations)
        self.chat_model.connect()
        self.entries, self.asked, self.usage, self._most_characters = [], 0, {}, None
        self._check_room()

    def _check_room(self) -> None:
        """Check that a prompt with one policy and a reply with one proposal fit.

        Raises:
            ValueError: If the prompt or the reply does not fit into the model's context.
        """
        integers = self.history.style == "integers"
        some = self.space.nearest(np.full(self.space.size, self.space.high if integers else 0.0))
        conversation = self._render([Entry(tuple(some.tolist()), 0.0, 1)], "")
        if not self.chat_model.fits(conversation, self.sampling):
            raise self._no_room()
        if not self.chat_model.fits(conversation, self.sampling, render_reply(some, self.space, self.history.style)):
            named = "1 parameter" if integers or self.space.size == 1 else f"{self.space.size} parameters"
            raise ValueError(
                f"searcher.sampling.max_new_tokens is {self.sampling.max_new_tokens}, but {self.chat_model.name} "
                f"needs more to write {named}; increase it."
            )

    def _no_room(self) -> ValueError:
        integers = self.history.style == "integers"
        shown = "one value of a parameter" if integers else f"one policy of {self.space.size} parameters"
        others = "" if integers else ", a shorter history.style without trajectories, or a policy with fewer parameters"
        return ValueError(
            f"{self.chat_model.name} has no room for a prompt with {shown} and a reply of sampling.max_new_tokens "
            f"{self.sampling.max_new_tokens}; take a model that reads longer prompts{others}."
        )

    def ask(self) -> np.ndarray:
        """Return the proposal of the model, rounded to the decimals of the space.

        Raises:
            ValueError: If no reply was usable, or the model cannot be reached.
        """
        self.metrics, self.replies, complaint = dict.fromkeys(_METRICS, 0.0), [], ""
        sent: list[list[list[Message]]] = []
        for attempt in range(self.max_tries):
            conversations, completions = self._request(attempt, complaint, sent)
            sent.append(conversations)
            self.replies.append({"reply": " ".join(completion.text for completion in completions), "rejected": ""})
            try:
                proposal = self._accept(completions)
            except ProposalError as error:
                complaint = self.replies[-1]["rejected"] = str(error)
                self.metrics["retries"] += 1
            else:
                self.asked += 1
                return proposal
        return self._give_up(complaint)

    def _request(
        self, attempt: int, complaint: str, sent: Sequence[list[list[Message]]]
    ) -> tuple[list[list[Message]], list[Completion]]:
        """Send a request, with fewer policies each time that the chat model rejects the prompt as too long.

        Args:
            attempt: number of the attempt, from 0.
            complaint: reason why the previous reply was rejected; empty in the first attempt.
            sent: the prompts of earlier attempts.

        Returns:
            The prompts and their replies.
        """
        while True:
            conversations = self._conversations(complaint)
            # A greedy request that is repeated would get the same replies.
            again = self.sampling.temperature == 0 and conversations in sent
            sampling = replace(self.sampling, temperature=1.0) if again else self.sampling
            try:
                return conversations, self._complete(attempt, conversations, sampling)
            except ConversationTooLongError:
                if self.metrics["shown"] <= 1:
                    raise
                self._most_characters = int(_SHORTER * max(map(_characters, conversations)))

    def _conversations(self, complaint: str) -> list[list[Message]]:
        """Return the prompt, or the prompts of all parameters, with as many policies as fit.

        Raises:
            ValueError: If a prompt with one policy does not fit into the model's context.
        """
        most = len(self.history.selected(self.entries))
        conversations, shown = self._render_all(complaint, most), most
        characters = self._most_characters
        if not self._fit(conversations, characters):
            counts = range(1, most)  # the length of a prompt increases with the number of policies
            shown = bisect_left(
                counts, True, key=lambda count: not self._fit(self._render_all(complaint, count), characters)
            )
            shown = max(1, shown)  # a prompt with one policy is sent even if it is longer than `characters`
            conversations = self._render_all(complaint, shown)
            if not self._fit(conversations):
                raise self._no_room()
        if shown < most and not self._warned:
            self._warned = True
            sentence = (
                "the prompt of %s has room for %d of the %d policies that searcher.history shows; the %s are left out"
            )
            left_out = "worst" if self.history.order == "value" else "oldest"
            logging.getLogger("lrl").warning(sentence, self.chat_model.name, shown, most, left_out)
        self.metrics["shown"] = shown
        return conversations

    def _fit(self, conversations: Sequence[list[Message]], characters: int | None = None) -> bool:
        """Return whether prompts fit into the model's context, and have at most a number of characters."""
        return all(
            (characters is None or _characters(conversation) <= characters)
            and self.chat_model.fits(conversation, self.sampling)
            for conversation in conversations
        )

    def _render_all(self, complaint: str, most: int) -> list[list[Message]]:
        """Return the prompt, or in style ``integers`` the prompt of each parameter, with at most ``most`` policies."""
        parameters = range(self.space.size if self.history.style == "integers" else 1)
        return [self._render(self.entries, complaint, most, parameter) for parameter in parameters]

    def _render(
        self, entries: Sequence[Entry], complaint: str, most: int | None = None, parameter: int = 0
    ) -> list[Message]:
        """Return one prompt with the history of some entries."""
        return self.prompt.render(
            space=self.space,
            task=self._task,
            history=self.history.render(entries, self.space, most, parameter),
            order=self.history.order,
            style=self.history.style,
            iteration=self.asked + 1,
            total=self.num_iterations,
            complaint=complaint,
        )

    def _complete(self, attempt: int, conversations: list[list[Message]], sampling: SamplingConfig) -> list[Completion]:
        """Return the reply to each prompt, and count what they cost."""
        request = ("prompted search", self.seed, self.asked, attempt)
        own = [seeds(*request)] if len(conversations) == 1 else seeds(*request, np.arange(len(conversations)))
        before = self.chat_model.report()
        try:
            completions = self.chat_model.complete(conversations, sampling, [int(seed) for seed in own])
        finally:  # a failed request may also have a cost
            self._spend(before, self.chat_model.report())
        for name in ("prompt_tokens", "completion_tokens", "cached"):
            self.metrics[name] += sum(getattr(completion, name) for completion in completions)
        self.metrics["prompt_characters"] += sum(map(_characters, conversations))
        return completions

    def _spend(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Add the chat model's counts of a request to the metrics of the proposal and the usage of the search."""
        spent = {name: value - (before.get(name) or 0) for name, value in after.items() if value is not None}
        for name, value in spent.items():
            self.usage[name] = self.usage.get(name, 0) + value
            if name in _COST_METRICS:
                self.metrics[_COST_METRICS[name]] = self.metrics.get(_COST_METRICS[name], 0.0) + value
        if "cost" in spent:
            self.metrics["total_cost"] = self.usage["cost"]

    def _accept(self, completions: Sequence[Completion]) -> np.ndarray:
        """Return the proposal of one reply, or of one reply per parameter.

        Raises:
            ProposalError: If the proposal is unusable.
        """
        cut = any(completion.finish_reason == "length" for completion in completions)
        if self.history.style == "integers":
            if cut:
                raise ProposalError("A reply was cut at its maximum length.")
            proposal = read_integers([completion.text for completion in completions], self.space)
        else:
            proposal = self.space.nearest(np.array(parse_parameters(completions[0].text, self.space, cut)))
        before = same_parameters(self.entries, proposal)
        if before is not None:
            self.metrics["duplicates"] += 1
            raise ProposalError(f"These parameters were tried before, with f(params) {before.value:.2f}.")
        return proposal

    def _give_up(self, complaint: str) -> np.ndarray:
        """Return a random policy, or raise, because all replies were unusable."""
        if self.on_failure == "stop":
            raise ValueError(
                f"{self.chat_model.name} gave no usable proposal {self.asked + 1} in searcher.max_tries "
                f"{self.max_tries} replies; the last was rejected because: {complaint}"
            )
        self.metrics["failed"] = 1.0
        rng = np.random.default_rng(int(seeds("failed proposal", self.seed, self.asked)))
        self.asked += 1
        return self.space.sample(rng)

    def tell(self, trial: Trial) -> None:
        """Add a trial to the history."""
        self.entries.append(Entry.of(trial))

    def state_dict(self) -> dict[str, Any]:
        """Return the history, the number of proposals and their costs."""
        entries = [asdict(entry) for entry in self.entries]
        state = {"asked": self.asked, "entries": entries, "usage": dict(self.usage)}
        return state | {"most_characters": self._most_characters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.asked = int(state_dict["asked"])
        self.entries = [Entry.restored(entry) for entry in state_dict["entries"]]
        self.usage, self._most_characters = dict(state_dict["usage"]), state_dict["most_characters"]


def _characters(conversation: Sequence[Message]) -> int:
    """Return the number of characters of a conversation."""
    return sum(len(message["content"]) for message in conversation)


_MINUS = dict.fromkeys(map(ord, "−–‒﹣－"), "-")  # noqa: RUF001 (models write them for a minus)
# Parsing takes linear time: quantifiers are possessive, and no two successive ones match the same character. The lazy
# one of _REASONING reads each character once.
_NUMBER = r"[+-]?+(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?+\d++)?+"
_MARKS = r"[\s`*\"'_]*+"
_ALONE = (
    rf"(?!,\d|{_MARKS}(?:[-=]>|[→⇒±=^×]|(?:\+/)?+[-+/]\s*+<?+\.?+\d|to\s++<?+[-+\d.])"
    r"|[\s`*\"'_]*\*\s*+<?+\.?+\d)"  # a product, unlike the end of bold text
)
"""What must not follow a number: a decimal comma, or another part of a sum, a range or a change (``1.0 -> 1.5``)."""
_ASSIGNMENT = re.compile(
    rf"params?+{_MARKS}\[\s*+(\d{{1,9}})\s*+\]{_MARKS}(?::=|[:=]){_MARKS}(<\s*+)?+({_NUMBER})(?![\w.]*\w)"
    rf"(?(2)\s*+>){_ALONE}",
    re.IGNORECASE,
)
"""For example ``params[0]: 1.2``, ``params[0] = .5``, ``**params[0]**: -1e-1`` or ``params[0]: <1.2>``."""
_SEPARATOR = r"(?:\s++(?:[,;]\s*+)?+|[,;]\s*+)"
_LIST = rf"{_NUMBER}(?:{_SEPARATOR}{_NUMBER})*+"
_BRACKETED = re.compile(rf"(params?+{_MARKS})?+(?:\[|(?<!\w)\()\s*+({_LIST})\s*+[,;]?+\s*+[\])]", re.IGNORECASE)
"""A list in brackets; group 1 matches if it is an index, as in ``params[0]``."""
_BARE_LINE = re.compile(
    rf"{_MARKS}(?:line\s++1{_MARKS}:{_MARKS})?+(?:params?+{_MARKS}[:=]{_MARKS})?+"  # prompts say "Line 1"
    rf"({_LIST})[\s,;.`*]*+",
    re.IGNORECASE,
)
_LAST_NUMBER = re.compile(r"(?:(?<![\d.])|(?=[+-]))[+-]?+[\d.]++(?:[eE][+-]?+\d*+)?+$")
_REASONING = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.IGNORECASE | re.DOTALL)
_REASONING_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)


def parse_parameters(text: str, space: ParameterSpace, cut: bool = False) -> list[float]:
    """Return the values that a reply proposes, without rounding.

    Values with an index, such as ``params[0]: 1.5``, may be anywhere in the reply and in any order; each index must
    occur once. If an index occurs more than once, a single complete list from the first to the last index is used.
    Values that are not single numbers (``1/2``, ``1.0 -> 1.5``) are ignored. Without indices, a list of numbers in
    brackets or on its own line is used. Reasoning between ``<think>`` and ``</think>`` is removed first.

    Args:
        text: the reply.
        space: the vectors that may be proposed.
        cut: whether the reply was truncated at its maximum length, so that its last number may be incomplete.

    Raises:
        ProposalError: If values are missing, illegal or contradictory, or if there are too many.
    """
    said = without_reasoning(text).translate(_MINUS)
    if cut:
        said = _LAST_NUMBER.sub("", said.rstrip())
    try:
        values = _indexed(said, space.size) or _listed(said, space.size)
        complaint = space.complaint(values)
    except ProposalError as error:
        complaint, values = str(error), []
    if complaint:
        raise ProposalError("The reply was cut at its maximum length: " * cut + complaint)
    return values


def without_reasoning(text: str) -> str:
    """Remove reasoning in ``<think>`` tags; if the last tag is not closed, everything after it is removed."""
    said = _REASONING.sub("\n", text)
    return _REASONING_END.split(said)[-1]  # the prompt may have opened the reasoning


def _indexed(text: str, size: int) -> list[float] | None:
    """Return the values of ``params[i]: value``; None if there are none."""
    lines = [[(int(match[1]), float(match[3])) for match in _ASSIGNMENT.finditer(line)] for line in text.splitlines()]
    found = [pair for line in lines for pair in line]
    if not found:
        return None
    indices = [index for index, _ in found]
    if len(set(indices)) < len(indices):
        lists = {tuple(values) for values in _complete_lists(lines, size)}
        if len(lists) == 1:
            return list(lists.pop())
        twice = next(index for index, count in Counter(indices).items() if count > 1)
        raise ProposalError(f"params[{twice}] was given more than once; give every index once.")
    by_index = dict(found)
    unknown = [index for index in indices if index >= size]
    if unknown and len(indices) <= size:
        raise ProposalError(f"params[{unknown[0]}] does not exist; the indices are 0 to {size - 1}.")
    missing = [index for index in range(size) if index not in by_index]
    if missing and len(missing) < size:
        raise ProposalError(
            f"{len(indices)} values were given; there must be {size}, and params[{missing[0]}] is missing."
        )
    return [by_index[index] for index in sorted(by_index)]


def _complete_lists(lines: Sequence[Sequence[tuple[int, float]]], size: int) -> Iterator[list[float]]:
    """Yield the values of lists from index 0 to ``size - 1`` on one line or on consecutive lines."""
    for start, first in enumerate(lines):
        if not first or first[0][0] != 0:
            continue
        pairs: list[tuple[int, float]] = []
        for place in range(start, len(lines)):
            line = lines[place]
            if len(pairs) >= size or not (pairs == [] or not line or line[0][0] == len(pairs)):
                break
            pairs.extend(line)
        if [index for index, _ in pairs] == list(range(size)):
            yield [value for _, value in pairs]


def _listed(text: str, size: int) -> list[float]:
    """Return a list of numbers without indices.

    Raises:
        ProposalError: If the reply contains no list, or several different lists.
    """
    found = [_numbers(match[2]) for match in _BRACKETED.finditer(text) if not match[1]]
    found += [_numbers(match[1]) for match in map(_BARE_LINE.fullmatch, text.splitlines()) if match]
    if not found:
        raise ProposalError("No parameters were found in the reply.")
    fitting = list(dict.fromkeys(values for values in found if len(values) == size))
    if len(fitting) > 1:
        raise ProposalError("Several different lists of parameters were given; give one.")
    return list(fitting[0] if fitting else max(found, key=len))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, re.findall(_NUMBER, text)))
