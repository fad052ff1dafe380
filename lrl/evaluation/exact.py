"""What a policy achieves on FrozenLake, exactly: asked in each state, and propagated through the transition table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.grid import Desc, FrozenLakeCodec, desc_of, draw
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.tabular import TransitionTable, optimal_q, optimal_success, reachable_states, success_probability
from lrl.evaluation.episodes import sampling_at
from lrl.policies.actor import Actor
from lrl.prompts.response_format import response_format
from lrl.types import RandomKeys, SamplingConfig

_CHUNK = 1024
"""States that a policy is asked at once."""

_TIE = 1e-9
"""Q-values closer together than this are equal: what value iteration leaves over is not a preference."""

_PATIENCE = 100
"""Episodes on known maps after which an environment is taken to have no other."""


@dataclass(frozen=True, kw_only=True)
class Lake:
    """One map as an environment has it."""

    desc: Desc
    table: TransitionTable
    steps: int
    """Time limit of an episode."""

    @property
    def start(self) -> int:
        """The state in which episodes begin."""
        return "".join(self.desc).index("S")

    @property
    def states(self) -> list[int]:
        """Those in which an agent can find itself and act, ascending."""
        return reachable_states(self.table, self.start)

    @property
    def optimum(self) -> float:
        """The success of the best policy there is, one that watches the clock."""
        return optimal_success(self.table, self.steps, self.start)

    @property
    def q_values(self) -> np.ndarray:
        """Values of the best stationary policy's actions, float64 ``(state, action)``."""
        return optimal_q([self.table])[0]

    @property
    def best_stationary(self) -> float:
        """The success of the policy that value iteration finds: the highest that learning from its values can reach."""
        return self.success(np.eye(self.table.num_actions)[self.q_values.argmax(-1)])

    def success(self, decisions: np.ndarray) -> float:
        """Success within the time limit of action probabilities ``(state, action)``.

        Where a row sums to less than 1 the rest are invalid answers; they count as lost.
        """
        return success_probability(self.table, decisions, self.steps, self.start)


@dataclass(frozen=True, kw_only=True)
class ExactResults:
    """A policy on some maps."""

    lakes: Sequence[Lake]
    decisions: Sequence[np.ndarray]
    """Per map, action probabilities ``(state, action)``; 0 where nobody acts."""

    @property
    def success(self) -> np.ndarray:
        """float64 ``(map,)``."""
        return np.array([lake.success(d) for lake, d in zip(self.lakes, self.decisions, strict=True)])

    @property
    def optimum(self) -> np.ndarray:
        """float64 ``(map,)``."""
        return np.array([lake.optimum for lake in self.lakes])


@dataclass(frozen=True, kw_only=True)
class WrongState:
    """A state in which a policy's greedy action is not a best one."""

    row: int
    column: int
    action: str
    """The greedy action."""
    probability: float
    """Its probability."""
    best: str
    """The best actions, joined by ``or``."""
    best_probability: float
    """The probability of any of them."""

    def __str__(self) -> str:
        return (
            f"row {self.row} column {self.column}: {self.action} has {self.probability:.2f}, "
            f"{self.best} (best) {self.best_probability:.2f}"
        )


def wrong_states(lake: Lake, greedy: np.ndarray, sampled: np.ndarray) -> list[WrongState]:
    """Return the states in which the greedy action is not a best one, ascending.

    The greedy action of a policy that writes text need not be the one that it samples most often: an action can have
    several texts, and the likeliest first token can lead to an unlikely text.

    Args:
        lake: the map.
        greedy: action probabilities ``(state, action)`` of greedy decoding; a row of zeros is an invalid response.
        sampled: action probabilities ``(state, action)`` of sampling; where a row sums to less than 1, the rest is
            invalid.
    """
    q, names, wrong = lake.q_values, FrozenLakeCodec().action_texts, list[WrongState]()
    for state in lake.states:
        best = np.flatnonzero(q[state] >= q[state].max() - _TIE)
        chosen, shares = (np.append(row[state], 1 - row[state].sum()) for row in (greedy, sampled))  # last: invalid
        action = int(chosen.argmax())
        if action in best:
            continue
        row, column = divmod(state, len(lake.desc[0]))
        wrong.append(
            WrongState(
                row=row,
                column=column,
                action=[*names, "an invalid response"][action],
                probability=float(shares[action]),
                best=" or ".join(names[action] for action in best),
                best_probability=float(sampled[state, best].sum()),
            )
        )
    return wrong


def is_frozen_lake(envs: EnvFactory) -> bool:
    """Whether the environment is one that can be evaluated exactly."""
    return isinstance(envs, GymnasiumEnvs) and isinstance(envs.codec, FrozenLakeCodec)


def lakes_of(envs: EnvFactory, num_maps: int = 1, seed: int = 10_000) -> list[Lake]:
    """Different maps on which episodes are played, in the order of their seeds.

    Args:
        envs: a FrozenLake.
        num_maps: how many are wanted; there are fewer where the environment does not have as many.
        seed: of the first episode.

    Raises:
        ValueError: it is not FrozenLake.
    """
    if not isinstance(envs, GymnasiumEnvs) or not isinstance(envs.codec, FrozenLakeCodec):
        name = getattr(envs, "id", type(envs).__name__)
        raise ValueError(f"env is {name!r}, which has no transition table; exact success needs a FrozenLake.")
    native, lakes = envs.make_native(), dict[Desc, Lake]()
    steps = native.spec.max_episode_steps if native.spec and native.spec.max_episode_steps else 100
    misses = 0
    while len(lakes) < num_maps and misses < _PATIENCE:
        native.reset(seed=seed)
        seed, desc = seed + 1, desc_of(native)
        misses = misses + 1 if desc in lakes else 0
        if desc not in lakes:
            table = TransitionTable.of(native.unwrapped.P)  # pyright: ignore[reportAttributeAccessIssue]
            lakes[desc] = Lake(desc=desc, table=table, steps=steps)
    native.close()
    return list(lakes.values())


def exact_evaluation(
    policy: Actor, lakes: Sequence[Lake], sampling: SamplingConfig | None = None, samples: int = 1, seed: int = 0
) -> ExactResults:
    """Ask a policy in every state of every map, without memory of earlier turns.

    Args:
        policy: one that speaks text, connected and configured.
        lakes: see :func:`lakes_of`.
        sampling: None decodes greedily.
        samples: answers per state; their frequencies are the probabilities.
        seed: of the answers.
    """
    states = [(number, state) for number, lake in enumerate(lakes) for state in lake.states]
    texts = [draw(state, lakes[number].desc) for number, state in states]
    actions = _ask(policy, [text for text in texts for _ in range(samples)], sampling, samples, seed)
    decisions = [np.zeros((lake.table.num_states, lake.table.num_actions)) for lake in lakes]
    for place, action in enumerate(actions):
        number, state = states[place // samples]
        if action is not None:
            decisions[number][state, action] += 1 / samples
    return ExactResults(lakes=lakes, decisions=decisions)


def _ask(
    policy: Actor, texts: Sequence[str], sampling: SamplingConfig | None, samples: int, seed: int
) -> list[int | None]:
    """Action per observation; None where the answer is invalid."""
    sampling = sampling_at(policy, 0.0) if sampling is None else sampling
    answers: list[str] = []
    for begin in range(0, len(texts), _CHUNK):
        chunk = np.arange(begin, min(begin + _CHUNK, len(texts)))
        keys = RandomKeys(seed=seed, purpose="exact", collection=0, env=chunk // samples, turn=chunk % samples)
        seen = [texts[index] for index in chunk.tolist()]
        answers += policy.act(seen, [()] * len(chunk), keys, sampling).actions
    return [_parsed(policy, answer) for answer in answers]


def _parsed(policy: Actor, answer: str) -> int | None:
    assert policy.codec is not None
    assert policy.response_format is not None
    try:
        return policy.codec.text_to_action(response_format(policy.response_format).extract(answer))
    except InvalidActionError:
        return None
