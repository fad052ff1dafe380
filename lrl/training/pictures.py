"""Callbacks that show what a policy does: pictures, exact success on FrozenLake, and statistics of groups."""

from __future__ import annotations

import csv
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import CSVLogger

from lrl.evaluation.exact import ExactResults, Lake, exact_evaluation, is_frozen_lake, lakes_of, wrong_states
from lrl.evaluation.pictures import Curve, aggregate, axis_label, draw_curves, new_figure, read_series, save_figure
from lrl.faults import appending
from lrl.functional.distributed import unsharded
from lrl.policies.policy import Policy
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.training.metrics import log_figure
from lrl.types import Rollout

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@register
class PolicyPicture(L.Callback):
    """Writes ``policy_start.png`` and ``policy.png`` (on FrozenLake only), and ``learning_curve.png``.

    The first is drawn before training, the others at its end.

    The learning curve shows the success rates that the run has logged against env steps. TensorBoard and Weights &
    Biases get the pictures as well.

    Args:
        samples: number of responses per state, sampled at temperature 1, whose frequencies are drawn.
    """

    def __init__(self, samples: PositiveInt = 64) -> None:
        check_arguments(PolicyPicture.__init__, locals(), "PolicyPicture")
        self.samples = samples

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the policy before training; a resumed run keeps the picture that it has."""
        path = Path(trainer.default_root_dir) / "policy_start.png"
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if trainer.global_step == 0 and is_frozen_lake(data.validation_env):
            lake = lakes_of(data.validation_env, 1, data.validation.seed)[0]
            self._draw_policy(trainer, pl_module, lake, path)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the policy on every rank, draw on the first."""
        folder = Path(trainer.default_root_dir)
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        baselines: dict[str, float] = {}
        if is_frozen_lake(data.validation_env):
            lake = lakes_of(data.validation_env, 1, data.validation.seed)[0]
            self._draw_policy(trainer, pl_module, lake, folder / "policy.png")
            if len(lakes_of(data.validation_env, 2, data.validation.seed)) == 1:
                baselines["optimum"] = lake.optimum
        if trainer.is_global_zero:
            self._draw_curve(trainer, baselines, folder)
            for path in filter(Path.exists, (folder / "policy.png", folder / "learning_curve.png")):
                log_figure(trainer.loggers, path, trainer.current_epoch)

    def _draw_policy(self, trainer: L.Trainer, pl_module: L.LightningModule, lake: Lake, path: Path) -> None:
        greedy, sampled = _evaluated(trainer, pl_module, lake, self.samples)
        if trainer.is_global_zero:
            title = f"exact success {greedy.success[0]:.3f}, optimum {lake.optimum:.3f}"
            draw_policy(lake, sampled.decisions[0], path, title)

    def _draw_curve(self, trainer: L.Trainer, baselines: Mapping[str, float], folder: Path) -> None:
        logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
        if logger is None:
            return
        logger.save()  # it writes only every n rows
        curves: list[Curve] = []
        for metric in ("rollout/success_rate", "val/exact_success"):
            with suppress(ValueError):  # not logged in this run
                series = [read_series(Path(logger.log_dir), metric, "env_steps")]
                curves.append(aggregate(axis_label(metric), series, "mean"))
        if curves:
            draw_curves(curves, "success_rate", "env_steps", folder / "learning_curve.png", baselines)


def _evaluated(trainer: L.Trainer, module: Any, lake: Lake, samples: int) -> tuple[ExactResults, ExactResults]:
    """Return the exact evaluations of the greedy policy, and of the policy sampled at temperature 1."""
    policy = module.policy
    with trainer.precision_plugin.forward_context(), unsharded(module):
        return exact_evaluation(policy, [lake]), exact_evaluation(policy, [lake], policy.sampling_at(1.0), samples)


_SOLVED = 0.97
"""Fraction of the best stationary policy's success rate from which a map counts as solved."""


@register
class ExactSuccess(L.Callback):
    """Logs ``val/exact_success`` after each validation on FrozenLake; does nothing elsewhere.

    The success rate is computed from the greedy action in each state and the transition table, so it has no sampling
    error. ``val/exact_success_of_optimum`` is its ratio to the optimal policy's rate. Both are averaged over maps. At
    the end of training on a single map, the log reports whether the map is solved, and lists the states in which the
    greedy action is not optimal, with the sampling probabilities of the greedy and the optimal actions.

    Args:
        num_maps: number of maps if the environment generates them; they are those of the first held-out episodes.
        samples: number of responses per state, sampled at temperature 1, for the probabilities in the final log.
    """

    def __init__(self, num_maps: PositiveInt = 100, samples: PositiveInt = 64) -> None:
        check_arguments(ExactSuccess.__init__, locals(), "ExactSuccess")
        self.num_maps, self.samples = num_maps, samples

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the policy; every rank does, so that all ranks make the same collective calls."""
        module: Any = pl_module
        lakes = self._lakes(trainer)
        if not lakes:
            return
        with trainer.precision_plugin.forward_context(), unsharded(pl_module):
            exact = exact_evaluation(module.policy, lakes)
        success, optimum = float(exact.success.mean()), float(exact.optimum.mean())
        module.publish({"val/exact_success": success, "val/exact_success_of_optimum": success / optimum})

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log whether a run on a single map solved it, and the states with wrong actions."""
        lakes = self._lakes(trainer)
        if len(lakes) != 1 or trainer.interrupted:
            return
        greedy, sampled = _evaluated(trainer, pl_module, lakes[0], self.samples)
        if trainer.is_global_zero:
            _log_solved(lakes[0], float(greedy.success[0]), greedy.decisions[0], sampled.decisions[0])

    def _lakes(self, trainer: L.Trainer) -> list[Lake]:
        """Return the maps of the validation environment; none if it is not FrozenLake."""
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not is_frozen_lake(data.validation_env):
            return []
        return lakes_of(data.validation_env, self.num_maps, data.validation.seed)


def _log_solved(lake: Lake, success: float, greedy: np.ndarray, sampled: np.ndarray) -> None:
    """Log whether the map is solved, given greedy and sampled action probabilities ``(state, action)``."""
    logger, optimum = logging.getLogger("lrl"), lake.best_stationary
    solved = success >= _SOLVED * optimum
    level = logging.INFO if solved else logging.WARNING
    wrong = wrong_states(lake, greedy, sampled)
    logger.log(
        level,
        "FrozenLake is %s: exact success %.3f, best stationary policy %.3f; in %d of %d states the greedy action is "
        "not a best one",
        *("solved" if solved else "NOT SOLVED", success, optimum, len(wrong), len(lake.states)),
    )
    for state in wrong:
        logger.log(level, "  %s", state)


_FIELDS: tuple[str, ...] = ("collection", "state", "episodes", "return_mean", "return_std", "action_entropy", "actions")


@register
class GroupStatistics(L.Callback):
    """Writes a row per collection and initial state to ``groups.csv`` in the run directory.

    The file helps to find out why a policy does not learn: a group in which all episodes take the same wrong action has
    ``return_std`` 0 and no gradient, and if its ``action_entropy`` stays near 0, the right action is never sampled.

    Columns: ``collection``; ``state``, the first line of the initial observation; ``episodes``, the number of episodes
    from that state; mean and standard deviation of their returns; entropy of the first actions in nats, and their
    frequencies. Groups with the same initial state share a row. Only groups of the first rank are written.
    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Append a row for each initial state of the collection that was just trained on."""
        rollout = getattr(getattr(trainer, "datamodule", None), "rollout", None)
        if rollout is None or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "groups.csv"
        new_file = not path.exists()
        with appending("a row of", path), path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _FIELDS)
            if new_file:
                writer.writeheader()
            for row in group_rows(rollout, getattr(pl_module, "policy", None)):
                writer.writerow({"collection": trainer.current_epoch} | row)


def group_rows(rollout: Rollout, policy: Policy | None) -> Iterator[dict[str, str | int | float]]:
    """Iterate over one row per initial state, in order of appearance.

    Args:
        rollout: rollout of complete episodes.
        policy: policy whose codec and response format parse the actions; a response without a legal action counts as
            ``invalid``. None counts the responses themselves.
    """
    members: dict[str, list[int]] = {}
    for env, observation in enumerate(rollout.observations[0]):
        members.setdefault(str(observation).strip().split("\n", 1)[0], []).append(env)
    for state, envs in members.items():
        returns = rollout.episode_returns[envs]
        actions = Counter(_action_text(policy, rollout.responses[0][env]) for env in envs)
        frequencies = {action: count / len(envs) for action, count in sorted(actions.items())}
        yield {
            "state": state,
            "episodes": len(envs),
            "return_mean": round(float(returns.mean()), 4),
            "return_std": round(float(returns.std(correction=0)), 4),
            "action_entropy": round(-sum(p * math.log(p) for p in frequencies.values()), 4),
            "actions": " ".join(f"{action}={frequency:.3f}" for action, frequency in frequencies.items()),
        }


def _action_text(policy: Policy | None, response: Any) -> str:
    if not isinstance(response, str) or policy is None or policy.codec is None or policy.response_format is None:
        return str(response)
    return policy.action_text(response) or "invalid"


# Pictures of a policy on FrozenLake.

_COLOURS = {"S": "#dbeafe", "F": "#eff6ff", "H": "#334155", "G": "#bbf7d0"}
_ARROWS = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""Directions of LEFT, DOWN, RIGHT and UP, as cells to the right and cells down."""
_BEST, _OTHER = "#1d4ed8", "#94a3b8"


def draw_policy(lake: Lake, decisions: np.ndarray, path: Path, title: str = "") -> None:
    """Draw the map to a PNG, with an arrow and the probability of each action in each state.

    The length of an arrow increases with the probability. The most probable action is blue. The probability of invalid
    actions is shown in red.

    Args:
        lake: the map.
        decisions: action probabilities ``(state, action)``; if a row sums to less than 1, the rest is the probability
            of invalid actions.
        path: path of the PNG; missing folders are created.
        title: title above the picture.
    """
    rows, columns = len(lake.desc), len(lake.desc[0])
    figure, axes = new_figure(1.35 * columns, 1.35 * rows + 0.4)
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title, fontsize=10)
    acting = set(lake.states)
    for state in range(rows * columns):
        row, column = divmod(state, columns)
        _draw_cell(axes, column, row, lake.desc[row][column])
        if state in acting:
            _draw_decision(axes, column + 0.5, row + 0.5, decisions[state])
    save_figure(figure, path)


def _draw_cell(axes: Axes, column: int, row: int, letter: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=_COLOURS[letter], edgecolor="white", linewidth=2))
    colour = "white" if letter == "H" else "#64748b"
    axes.text(column + 0.06, row + 0.06, letter, ha="left", va="top", fontsize=8, color=colour)


def _draw_decision(axes: Axes, x: float, y: float, probabilities: np.ndarray) -> None:
    best = int(probabilities.argmax())
    for action, probability in enumerate(probabilities.tolist()):
        if probability < 0.005:
            continue
        right, down = _ARROWS[action]
        colour, reach = (_BEST if action == best else _OTHER), 0.08 + 0.22 * probability
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1 + 2 * probability, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(x + right * reach, y + down * reach), xytext=(x, y), arrowprops=style)
        axes.text(
            x + right * 0.38,
            y + down * 0.38,
            f"{probability:.2f}".lstrip("0"),
            ha="center",
            va="center",
            fontsize=6.5,
            color=colour,
        )
    if probabilities.sum() < 0.995:
        invalid = f"{1 - probabilities.sum():.2f}".lstrip("0")
        axes.text(x + 0.44, y - 0.4, f"invalid {invalid}", ha="right", va="top", fontsize=6, color="#dc2626")
