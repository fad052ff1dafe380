"""Prompts that ask a language model for parameters: of an unknown function (ProPS), or of a policy (ProPS+)."""

from __future__ import annotations

from dataclasses import dataclass

from lrl.models.chat import Message
from lrl.ranges import PositiveFloat, check_fields
from lrl.search.integers import integer_space
from lrl.search.space import ParameterSpace

_FUNCTION = (
    "You search for the maximum of an unknown function f of {size} parameters. Nothing is known of f but the values "
    "that it took at the parameters tried so far, each measured with some randomness."
)
_POLICY = (
    "You search for the best parameters of a policy that acts in the environment below. f(params) is the mean over "
    "episodes of the sum of all rewards of an episode; larger is better.\n\nEnvironment: {environment}\n\n"
    "Policy: {policy}"
)
_REAL = "params has {size} entries. Each is a number from {low:g} to {high:g}{rounded}."
_TABLE = "params has {size} entries. Each is one of {actions}."
_INDEXED = (
    "Reply with two lines. Line 1 holds the parameters to try next, every index from 0 to {last} once and in order, as "
    "in this pattern:\n{pattern}\nLine 2 gives the reason for this choice in one or two sentences."
)
_COMPACT = "Reply with the parameters to try next: {size} numbers in one line, separated by spaces, and nothing else."
_NO_REPEATS = "Parameters that were tried before must not be proposed again."
_STEP = (
    "Move some parameters by about {step:g} from good ones, up as well as down. Where this no longer helps, try "
    "parameters far from all others."
)
_VALUES = "Try every legal value of an entry before it is settled."
_OPTIMUM = "The maximum of f is about {optimum:g}. Values well below it belong to a local maximum: explore further."
_HISTORY = "Tried so far, {order}:\n{history}"
_NOTHING = "Nothing was tried so far."
_ROUND = "This is proposal {iteration} of {total}."
_REJECTED = "Your previous reply to this was rejected: {complaint} Correct that."
_INTEGERS = "{size} numbers from {legal}, {iteration} of {total}:"
"""All that a model is shown besides the history if it was trained to search."""
_PATTERN_ENTRIES = 12
"""Number of parameters up to which the pattern of the reply is written in full."""


@dataclass(frozen=True, kw_only=True)
class TaskText:
    """Holds in words what is searched."""

    environment: str = ""
    """What the environment is: its observations, actions and rewards."""
    policy: str = ""
    """What the parameters are to the policy."""


@dataclass(frozen=True, kw_only=True)
class SearchPrompt:
    """Configures what a prompt says besides the history."""

    describe_environment: bool = False
    """Whether the environment and the policy are described (ProPS+), or the parameters are those of an unknown function
    (ProPS)."""
    environment: str | None = None
    """Description of the environment; null takes what is known of it, or the codec's."""
    optimum: float | None = None
    """The largest possible mean return, to be told to the model; null leaves it out, as the model could not know it."""
    step_size: PositiveFloat | None = 1.0
    """How far proposals should be from each other in each real parameter; null leaves it out."""

    def __post_init__(self) -> None:
        check_fields(self, "searcher.prompt")
        if self.environment is not None and not self.describe_environment:
            raise ValueError(
                "searcher.prompt.environment is set, but describe_environment is false; set it to true, or leave the "
                "description out."
            )

    def check_style(self, style: str) -> None:
        """Raise if the prompt of a style would not say what is configured.

        Raises:
            ValueError: ``style`` is integers, and a setting is not the default.
        """
        unset = SearchPrompt()
        for name in ("describe_environment", "optimum", "step_size") if style == "integers" else ():
            value = getattr(self, name)
            if value != getattr(unset, name):
                raise ValueError(
                    f"searcher.prompt.{name} is {value}, but history.style is integers, which has no such sentence; "
                    "leave it out."
                )

    def render(
        self,
        *,
        space: ParameterSpace,
        task: TaskText,
        history: str,
        order: str = "time",
        style: str = "indexed",
        iteration: int = 1,
        total: int = 1,
        complaint: str = "",
        allow_repeats: bool = False,
    ) -> list[Message]:
        """Return the conversation, which is one message of the user.

        Args:
            space: what may be proposed.
            task: the environment and the policy in words.
            history: the policies so far, as :meth:`lrl.search.history.HistoryConfig.render` writes them.
            order: ``time`` or ``value``.
            style: ``indexed`` or ``compact``, for the reply; ``integers``: one line and the history of one parameter.
            iteration: number of this proposal, from 1.
            total: number of all proposals.
            complaint: why the previous reply was rejected, one sentence; empty for the first try.
            allow_repeats: whether parameters that were tried before may be proposed again.
        """
        if style == "integers":
            return [{"role": "user", "content": integer_prompt(space, history, iteration, total)}]
        task = task if self.environment is None else TaskText(environment=self.environment, policy=task.policy)
        ordered = "oldest first" if order == "time" else "worst first"
        parts = [
            self._role(space, task),
            _legal(space),
            _reply(space, style),
            "\n".join(f"- {rule}" for rule in self._rules(space, allow_repeats)),
            _HISTORY.format(order=ordered, history=history) if history else _NOTHING,
            _ROUND.format(iteration=iteration, total=total),
            _REJECTED.format(complaint=complaint) if complaint else "",
        ]
        return [{"role": "user", "content": "\n\n".join(filter(None, parts))}]

    def _role(self, space: ParameterSpace, task: TaskText) -> str:
        if self.describe_environment:
            return _POLICY.format(environment=task.environment, policy=task.policy)
        return _FUNCTION.format(size=space.size)

    def _rules(self, space: ParameterSpace, allow_repeats: bool) -> list[str]:
        rules = [] if allow_repeats else [_NO_REPEATS]
        if space.actions is not None:
            rules.append(_VALUES)
        elif self.step_size is not None:
            rules.append(_STEP.format(step=self.step_size))
        if self.optimum is not None:
            rules.append(_OPTIMUM.format(optimum=self.optimum))
        return rules


def integer_prompt(space: ParameterSpace, history: str, iteration: int, total: int) -> str:
    """Return the prompt for a model that was trained to search: one line, and the history of one parameter."""
    numbers = integer_space(space)
    legal = f"0 to {numbers.high:g}" if space.actions is None else " ".join(map(str, space.actions))
    head = _INTEGERS.format(size=space.size, legal=legal, iteration=iteration, total=total)
    return f"{head}\n{history}" if history else head


def _legal(space: ParameterSpace) -> str:
    if space.actions is not None:
        return _TABLE.format(size=space.size, actions=", ".join(map(str, space.actions)))
    places = {None: "", 0: ", without decimals", 1: ", with one decimal"}
    rounded = places.get(space.decimals, f", with {space.decimals} decimals")
    return _REAL.format(size=space.size, low=space.low, high=space.high, rounded=rounded)


def _reply(space: ParameterSpace, style: str) -> str:
    if style == "compact":
        return _COMPACT.format(size=space.size)
    entries = [f"params[{index}]: <value>" for index in range(space.size)]
    if space.size > _PATTERN_ENTRIES:
        entries = [*entries[:2], "...", entries[-1]]
    return _INDEXED.format(last=space.size - 1, pattern=", ".join(entries))
