"""RAGEN's boards: FrozenLake with random maps, starts and goals, and Sokoban, with exact optimal actions.

The rules, the distribution of boards, the rewards and the time limits are those that SCOUT (arXiv:2601.21754) uses,
which builds on RAGEN (arXiv:2504.20073) and gym-sokoban. The implementations are independent of theirs.

FrozenLake: 4 x 4 cells, each of which is ice with probability 0.9; start and goal are two random cells, and the goal
can be reached. On slippery ice a move has the chosen direction with probability 0.8, and each of the two sides with
probability 0.1. The reward is 1 at the goal. The limit is 25 actions (10 in RAGEN).

Sokoban: a room of 6 x 6 cells including the outer wall, carved by a random walk of 20 steps. A room is generated
backwards from its solution: the boxes are placed on the targets, and a search pulls them away. It maximises the product
of two numbers: the sum of the distances between boxes and targets, and how often the search changes the box that it
pulls. The player then walks up to three random steps. The reward is -0.1 per action, 1 for each box pushed onto a
target, -1 for each one pushed off, 10 for the solution. The limit is 10 actions; some rooms with two boxes need more.

Differences from RAGEN:

1. If the generation of a room fails, it is repeated with the same random number generator. RAGEN takes another seed.
2. The seed of a reset determines the board. Equal seeds give the same maps of FrozenLake as in RAGEN. Rooms of Sokoban
   have RAGEN's distribution, but equal seeds give other rooms than in RAGEN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsInt

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from lrl.codecs.boards import BOARDS, Board
from lrl.codecs.toy_text import Desc
from lrl.envs.frozen_lake import transition_table as lake_table
from lrl.envs.tabular import TransitionTable, optimal_q


class BoardEnv(gym.Env, ABC):
    """Abstract base class of environments whose observation is a one-hot board, see :mod:`lrl.codecs.boards`.

    ``info["success"]`` is whether the board is solved.

    Args:
        board: describes the cells and the actions.
        size: side length in cells.
        render_mode: ``ansi`` renders RAGEN's symbols; None renders nothing.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, board: Board, size: int, render_mode: str | None) -> None:
        self.board, self.size, self.render_mode = board, size, render_mode
        shape = (size, size, len(board.kinds))
        self.observation_space = spaces.Box(0, 1, shape, np.uint8)
        self.action_space = spaces.Discrete(len(board.actions))
        self._one_hot = np.eye(len(board.kinds), dtype=np.uint8)
        self._fixed = np.zeros((size * size, len(board.kinds)), dtype=np.uint8)
        """One-hot kind that each cell has without the agent and the boxes, ``(cell, kind)``."""

    def _observe(self, cells: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the observation in which the given ``(cell, kind)`` pairs replace the fixed kinds of these cells."""
        observation = self._fixed.copy()
        for cell, kind in cells:
            observation[cell] = self._one_hot[kind]
        return observation.reshape(self.size, self.size, -1)

    @abstractmethod
    def observation(self) -> np.ndarray:
        """Return the current observation, uint8 ``(row, column, kind)``."""

    def render(self) -> str | None:
        """Return the symbols of all cells, one line per row."""
        if self.render_mode is None:
            return None
        rows = self.observation().argmax(-1).tolist()
        return "\n".join("".join(self.board.kinds[kind][0] for kind in row) for row in rows)


# FrozenLake.

_LAKE_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Step of each action, ``(row, column)``: left, down, right, up."""
_PLAYER, _ICE, _HOLE, _GOAL, _IN_HOLE, _ON_GOAL = range(6)
_LAKE_KINDS = {"S": _ICE, "F": _ICE, "H": _HOLE, "G": _GOAL}


def sample_lake(rng: np.random.Generator, size: int = 4, p: float = 0.9) -> Desc:
    """Sample a map with a random start and goal on which the goal can be reached.

    Args:
        rng: random number generator. Its draws are those of RAGEN, so that equal seeds give equal maps.
        size: side length in cells.
        p: probability that a cell is ice.
    """
    while True:
        cells = rng.choice(["F", "H"], (size, size), p=[p, 1 - p])
        start, goal = (tuple(rng.integers(size, size=2).tolist()) for _ in range(2))
        if start == goal:
            continue
        cells[start], cells[goal] = "S", "G"
        desc = tuple("".join(row) for row in cells.tolist())
        if _goal_is_reachable(desc):
            return desc


def _goal_is_reachable(desc: Desc) -> bool:
    """Return whether a path of ice leads from the start to the goal."""
    size, cells = len(desc), "".join(desc)
    reached, frontier = {cells.index("S")}, [cells.index("S")]
    while frontier:
        cell = frontier.pop()
        if cells[cell] == "G":
            return True
        new = {_lake_move(cell, action, size) for action in range(4)} - reached
        new = {after for after in new if cells[after] != "H"}
        reached |= new
        frontier += new
    return False


def _lake_move(cell: int, action: int, size: int) -> int:
    """Return the cell after a move, which stays on the map."""
    row, column = divmod(cell, size)
    down, right = _LAKE_MOVES[action]
    return min(max(row + down, 0), size - 1) * size + min(max(column + right, 0), size - 1)


class RagenLakeEnv(BoardEnv):
    """RAGEN's FrozenLake, ``lrl/RagenFrozenLake-v0`` and ``lrl/RagenFrozenLakeSlippery-v0``.

    Args:
        size: side length in cells.
        p: probability that a cell is ice.
        is_slippery: whether moves can slip to the sides.
        success_rate: probability that a move on slippery ice has the chosen direction.
        render_mode: see :class:`BoardEnv`.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        size: int = 4,
        p: float = 0.9,
        is_slippery: bool = False,
        success_rate: float = 0.8,
        render_mode: str | None = None,
    ) -> None:
        if size < 2:
            raise ValueError(f"size is {size}; it must be at least 2.")
        for name, probability in (("p", p), ("success_rate", success_rate)):
            if not 0 < probability <= 1:
                raise ValueError(f"{name} is {probability}; it must be in (0, 1].")
        super().__init__(BOARDS["frozen_lake"], size, render_mode)
        self.p, self.is_slippery, self.success_rate = p, is_slippery, success_rate
        self.map: Desc = ()
        """Map of the current episode."""
        self._cells, self._cell = "", 0
        self._best: list[int] = []

    @property
    def table(self) -> TransitionTable:
        """Transition table of the current map."""
        return lake_table(self.map, self.is_slippery, self.success_rate)

    @property
    def start(self) -> int:
        """Initial state of the current map, the index of a cell."""
        return self._cells.index("S")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Sample a map and start an episode on it."""
        super().reset(seed=seed)
        self.map = sample_lake(self.np_random, self.size, self.p)
        self._cells, self._best = "".join(self.map), []
        self._cell = self.start
        self._fixed = self._one_hot[[_LAKE_KINDS[cell] for cell in self._cells]]
        return self.observation(), {}

    def step(self, action: SupportsInt) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move to the left (0), down (1), to the right (2) or up (3)."""
        direction = int(action)
        if self.is_slippery:
            slip = self.np_random.random() - self.success_rate
            if slip >= 0:  # the move slips to one of the two sides with equal probability
                direction = (direction + (1 if slip < (1 - self.success_rate) / 2 else -1)) % 4
        self._cell = _lake_move(self._cell, direction, self.size)
        letter = self._cells[self._cell]
        success = letter == "G"
        return self.observation(), float(success), letter in "GH", False, {"success": success}

    def observation(self) -> np.ndarray:
        """Return the map with the agent's cell."""
        letter = self._cells[self._cell]
        return self._observe([(self._cell, {"G": _ON_GOAL, "H": _IN_HOLE}.get(letter, _PLAYER))])

    def expert_action(self) -> int:
        """Return an optimal action according to value iteration with discount factor 0.99; of several, the first."""
        if not self._best:
            self._best = optimal_q([self.table])[0].argmax(-1).tolist()
        return self._best[self._cell]


# Sokoban. A set of cells is an integer with one bit per cell, whose index is ``row * size + column``.

_PATTERNS = (
    ((1, 0), (1, 1), (1, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 0), (2, 1)),
    ((1, 1), (1, 2), (2, 1)),
)
"""Cells that a step of the random walk carves, ``(row, column)`` in a square of 3 x 3 around the walker."""
_WALK_MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))
_TURN = 0.35
"""Probability that the random walk samples a new direction before a step."""
_MOST_STATES = 300_000
"""Number of states after which the search for the initial state of a room ends."""
_STORED, _BOX, _AGENT, _AGENT_ON_TARGET = 3, 4, 5, 6
"""Kinds of cells with a box or the player; 0 is a wall, 1 floor and 2 a target."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Represents a room of Sokoban at the start of an episode. Sets of cells are integers with one bit per cell."""

    size: int
    """Side length in cells, including the outer wall."""
    floor: int
    """Cells that are not walls."""
    targets: int
    """Cells of the targets."""
    boxes: int
    """Initial cells of the boxes."""
    player: int
    """Index of the initial cell of the player."""

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """Change of the index of the player's cell by the actions up, down, left and right."""
        return -self.size, self.size, -1, 1


def move(floor: int, player: int, boxes: int, step: int) -> tuple[int, int]:
    """Return the player and the boxes after a step; a wall, or a box that cannot be pushed, leaves both unchanged."""
    cell = player + step
    if not floor >> cell & 1:
        return player, boxes
    if not boxes >> cell & 1:
        return cell, boxes
    behind = cell + step
    if not (floor & ~boxes) >> behind & 1:
        return player, boxes
    return cell, boxes ^ (1 << cell | 1 << behind)


def sample_room(rng: np.random.Generator, num_boxes: int = 1, size: int = 6, search_depth: int = 300) -> Room:
    """Sample a room that can be solved, in which no box is on a target.

    Args:
        rng: random number generator.
        num_boxes: number of boxes and of targets.
        size: side length in cells, including the outer wall.
        search_depth: maximum depth of the search that pulls the boxes away from their targets.
    """
    while True:
        floor = _carve(rng, size)
        cells = _cells(floor)
        if len(cells) <= num_boxes + 1:
            continue
        player, *targets = rng.permutation(cells)[: num_boxes + 1].tolist()
        room = Room(size=size, floor=floor, targets=_bits(targets), boxes=_bits(targets), player=player)
        found = _pull_boxes(room, search_depth)
        if found is not None:
            distance, player, boxes = found
            room = replace(room, boxes=boxes, player=player)
            return replace(room, player=_walk(rng, room, 0.8 if distance == 1 else 0.5))


def _bits(cells: Sequence[int]) -> int:
    return sum(1 << cell for cell in cells)


def _cells(bits: int) -> list[int]:
    return [cell for cell in range(bits.bit_length()) if bits >> cell & 1]


def _carve(rng: np.random.Generator, size: int) -> int:
    """Return the floor cells that a random walk carves, one bit per cell."""
    steps = int(1.7 * 2 * size)
    row, column = rng.integers(1, size, size=2).tolist()
    directions, turns = rng.integers(4, size=steps + 1).tolist(), rng.random(steps).tolist()
    direction, floor = directions[steps], 0
    for step, pattern in enumerate(rng.integers(len(_PATTERNS), size=steps).tolist()):
        if turns[step] < _TURN:
            direction = directions[step]
        row = min(max(row + _WALK_MOVES[direction][0], 1), size - 2)
        column = min(max(column + _WALK_MOVES[direction][1], 1), size - 2)
        corner = (row - 1) * size + column - 1
        floor |= _bits([corner + down * size + right for down, right in _PATTERNS[pattern]])
    return floor & _bits([row * size + column for row in range(1, size - 1) for column in range(1, size - 1)])


def _pull_boxes(room: Room, search_depth: int) -> tuple[int, int, int] | None:
    """Pull the boxes away from their targets by a depth-first search.

    A move of the player also pulls the box in the cell directly behind the player, if there is one. A state's score is
    the sum of the distances between boxes and their targets, multiplied by the number of pulls that move another box
    than the previous pull, or are the first. The score is 0 if a box or the player is on a target. The first state with
    the highest score is chosen.

    Returns:
        Sum of the distances, player and boxes; None if no state has a positive score.
    """
    targets, floor = _cells(room.targets), room.floor
    best, best_score = None, 0
    # Each element: player, cell of each target's box, bits of the boxes not pulled yet, number of changes of the box,
    # index of the box pulled last, remaining depth.
    stack = [(room.player, tuple(targets), room.boxes, 0, -1, search_depth - 1)]
    explored = set()
    while stack and len(explored) < _MOST_STATES:
        player, boxes, fresh, changes, last, depth = stack.pop()
        occupied = _bits(boxes)
        state = (player, occupied, fresh)
        if depth <= 0 or state in explored:
            continue
        explored.add(state)
        if not room.targets & (occupied | 1 << player):
            distance = sum(_distance(cell, target, room.size) for cell, target in zip(boxes, targets, strict=True))
            if changes * distance > best_score:
                best, best_score = (distance, player, occupied), changes * distance
        free = floor & ~occupied
        for step in reversed(room.steps):  # so that states are popped in the order of the actions
            if not free >> (player + step) & 1:
                continue
            behind = player - step
            if not occupied >> behind & 1:
                stack.append((player + step, boxes, fresh, changes, last, depth - 1))
                continue
            pulled = boxes.index(behind)
            moved = (*boxes[:pulled], player, *boxes[pulled + 1 :])
            stack.append((player + step, moved, fresh & ~(1 << behind), changes + (pulled != last), pulled, depth - 1))
    return best


def _distance(cell: int, other: int, size: int) -> int:
    """Return the Manhattan distance between two cells."""
    return abs(cell // size - other // size) + abs(cell % size - other % size)


def _walk(rng: np.random.Generator, room: Room, probability: float) -> int:
    """Return the player's cell after one to three random steps, or with ``1 - probability`` none; no box moves."""
    player, visited = room.player, [room.player]
    if rng.random() > probability:
        return player
    for _ in range(3):
        free = [cell for step in room.steps if (room.floor & ~room.boxes) >> (cell := player + step) & 1]
        free = [cell for cell in free if cell not in visited]
        if not free:
            break
        player = free[int(rng.integers(len(free)))]
        visited.append(player)
        if rng.random() > 0.5:
            break
    return player


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Holds the states that can be reached from the start of a room, in the order of a breadth-first search."""

    index: dict[tuple[int, int], int]
    """Index of each state ``(player, boxes)``."""
    next_state: np.ndarray
    """Index of the next state, int64 ``(state, action)``; a solved state is followed by itself."""
    distance: np.ndarray
    """Smallest number of actions to a solved state, int64 ``(state,)``; -1 if the state cannot be solved."""

    @property
    def length(self) -> int:
        """Number of actions of the shortest solution of the room."""
        return int(self.distance[0])

    def best_action(self, player: int, boxes: int) -> int:
        """Return the first action of a shortest solution of a state; 0 if the state cannot be solved."""
        state = self.index[player, boxes]
        after = self.distance[self.next_state[state]]
        return int((after == self.distance[state] - 1).argmax()) if self.distance[state] > 0 else 0

    def table(self) -> TransitionTable:
        """Return the transition table of the room, with reward 1 for its solution and 0 otherwise."""
        solved = (self.distance == 0)[self.next_state] & (self.distance != 0)[:, None]
        return TransitionTable(
            next_state=self.next_state[..., None],
            probability=np.ones((*self.next_state.shape, 1)),
            reward=solved[..., None].astype(np.float64),
            terminated=(self.distance == 0)[self.next_state][..., None],
        )


def solve(room: Room) -> Solution:
    """Find the shortest solutions from all reachable states.

    A breadth-first search from the start finds the states, and a second one, backwards from the solved states, finds
    their distances.
    """
    start = (room.player, room.boxes)
    index, states, rows = {start: 0}, [start], []
    for player, boxes in states:  # grows while it is iterated over
        row = []
        for step in room.steps:
            after = (player, boxes) if boxes == room.targets else move(room.floor, player, boxes, step)
            if after not in index:
                index[after] = len(states)
                states.append(after)
            row.append(index[after])
        rows.append(row)
    before: list[list[int]] = [[] for _ in states]
    for state, row in enumerate(rows):
        for after in row:
            before[after].append(state)
    distance = [0 if boxes == room.targets else -1 for _, boxes in states]
    queue = deque(state for state, steps in enumerate(distance) if steps == 0)
    while queue:
        state = queue.popleft()
        for previous in before[state]:
            if distance[previous] < 0:
                distance[previous] = distance[state] + 1
                queue.append(previous)
    return Solution(index=index, next_state=np.array(rows), distance=np.array(distance))


class SokobanEnv(BoardEnv):
    """Sokoban with random rooms, ``lrl/Sokoban1Box-v0`` and ``lrl/Sokoban2Boxes-v0``.

    Args:
        num_boxes: number of boxes.
        size: side length of the room in cells, including the outer wall.
        search_depth: maximum depth of the search that pulls the boxes away from their targets.
        render_mode: see :class:`BoardEnv`.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self, num_boxes: int = 1, size: int = 6, search_depth: int = 300, render_mode: str | None = None
    ) -> None:
        if size < 5:
            raise ValueError(f"size is {size}; it must be at least 5.")
        most = (size - 2) ** 2 // 4
        if not 1 <= num_boxes <= most:
            raise ValueError(f"num_boxes is {num_boxes}; it must be from 1 to {most} in a room of size {size}.")
        if search_depth < 2:
            raise ValueError(f"search_depth is {search_depth}; it must be at least 2.")
        super().__init__(BOARDS["sokoban"], size, render_mode)
        self.num_boxes, self.search_depth = num_boxes, search_depth
        self.room = Room(size=size, floor=0, targets=0, boxes=0, player=0)
        """Room at the start of the current episode."""
        self._player = self._boxes = 0
        self._solution: Solution | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Sample a room and start an episode in it."""
        super().reset(seed=seed)
        room = self.room = sample_room(self.np_random, self.num_boxes, self.size, self.search_depth)
        self._player, self._boxes, self._solution = room.player, room.boxes, None
        kinds = [(room.floor >> cell & 1) + (room.targets >> cell & 1) for cell in range(self.size**2)]
        self._fixed = self._one_hot[kinds]
        return self.observation(), {}

    def step(self, action: SupportsInt) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move or push up (0), down (1), to the left (2) or to the right (3)."""
        room, stored = self.room, (self._boxes & self.room.targets).bit_count()
        self._player, self._boxes = move(room.floor, self._player, self._boxes, room.steps[int(action)])
        solved = self._boxes == room.targets
        reward = (self._boxes & room.targets).bit_count() - stored - 0.1 + 10.0 * solved
        return self.observation(), reward, solved, False, {"success": solved}

    def observation(self) -> np.ndarray:
        """Return the room with the boxes and the player."""
        targets = self.room.targets
        cells = [(cell, _STORED if targets >> cell & 1 else _BOX) for cell in _cells(self._boxes)]
        cells.append((self._player, _AGENT_ON_TARGET if targets >> self._player & 1 else _AGENT))
        return self._observe(cells)

    def expert_action(self) -> int:
        """Return the first action of a shortest solution of the current state; 0 if it cannot be solved."""
        if self._solution is None:
            self._solution = solve(self.room)
        return self._solution.best_action(self._player, self._boxes)
