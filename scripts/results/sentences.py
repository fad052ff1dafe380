"""Figures in sentences of the documentation, computed from kept results, configurations and the embedded model.

``scripts/results.py write`` replaces the numbers of each :class:`Sentence`. Other numbers in the README must be listed
in :data:`NOT_MEASURED`. In all pages, a figure with an interval or with the values of its seeds, such as ``0.934 (0.892
to 0.976; 5 seeds)``, and a number with three decimals must be in a generated table of its page, except for
:data:`UNCHECKED`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lrl.cli.options import PlayOptions
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.statistics import bootstrap_interval, headline_seed, t_interval
from results.headlines import random_success, rounded
from results.summaries import final_values

Results = Mapping[str, dict[str, Any]]

_NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
_TABLES = re.compile(r"<!-- table: .*?<!-- end table -->", re.DOTALL)
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", re.DOTALL)
_EXACT = re.compile(r"(?<![\w.,:-])-?\d+(?:,\d{3})*\.\d{3}(?![\d\w])")
"""A number with three decimals, as most tables have them."""
_SPREAD = re.compile(rf"({_NUMBER}) \(({_NUMBER}(?:, {_NUMBER})+|{_NUMBER} to {_NUMBER})(?:[;,] \d+ seeds)?\)")


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A part of a sentence whose numbers are computed."""

    text: str
    """The words, with ``{}`` in place of each number."""
    figures: Callable[[Results], Sequence[str]]
    """Returns the numbers as text, given the kept results by name."""


def _config(name: str) -> dict[str, Any]:
    """Return a configuration."""
    return yaml.safe_load((Path("configs") / name).read_text(encoding="utf-8"))


def _parameters(folder: str) -> int:
    """Return the number of parameters of a language model in a folder, from the header of its weights."""
    data = (Path(folder) / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _peak_gb(results: Results, config: str) -> str:
    """Return the memory of a configuration until the first line of its run, in GB."""
    costs = results["benchmark_configurations"]["configurations"]
    return f"{next(cost for cost in costs if cost['config'] == config)['peak_gb']:.1f}"


def _minutes(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the shortest and the longest duration of the runs of a result, in whole minutes."""
    minutes = [run["minutes"] for run in result["runs"]]
    return f"{min(minutes):.0f}", f"{max(minutes):.0f}"


def _value_of_seed(result: Mapping[str, Any], seed: int) -> str:
    """Return the final value of the run with a seed."""
    return rounded(next(run for run in result["runs"] if run["seed"] == seed)["curve"][result["metric"]][-1])


def _experiment(results: Results) -> list[str]:
    """Return the figures of the README's experiment on Acrobot: CPU time, memory and returns."""
    first, other = results["readme_runs"]["runs"][:2]
    (random,) = [row for row in results["baselines_random"]["environments"] if row["env_id"] == "Acrobot-v1"]
    memory = f"{max(first['peak_gb'], other['peak_gb']):.1f}"
    cpu = f"{first['first_line_cpu_seconds']:.0f}", f"{first['cpu_minutes']:.0f}"
    returns = (rounded(value) for value in (first["val/return"], other["val/return"], random["return_mean"]))
    return [*cpu, memory, f"{first['episodes']}", *returns]


def _difference(results: Results, name: str, other: str) -> list[str]:
    """Return the mean difference between two results with the same seeds, and its bootstrap interval over seeds."""
    differences = final_values(results[name]) - final_values(results[other])
    return [f"{value:.0f}" for value in (differences.mean(), *bootstrap_interval(differences))]


def _network(results: Results) -> list[str]:
    """Return the mean difference between a language model and a network on BabyAI-Text, with two intervals."""
    differences = final_values(results["babyai_reward_alone"]) - final_values(results["babyai_ppo_mlp"])
    intervals = (*bootstrap_interval(differences), *t_interval(differences))
    return [f"{value:.3f}" for value in (differences.mean(), *intervals)]


def _mean_cells(results: Results, name: str) -> list[str]:
    """Return the mean success over policies in each environment of a table of cells."""
    cells: dict[str, list[float]] = {}
    for row in results[name]["environments"]:
        cells.setdefault(f"{row['env_id']} {row['env_kwargs']}", []).append(row["success_rate"])
    return [f"{np.mean(rates):.3f}" for rates in cells.values()]


def _gain(result: Mapping[str, Any]) -> list[str]:
    """Return the gain of in-context search over random search, with its interval."""
    one = result["searchers"]["in_context"]
    return [f"{value:.3f}" for value in (one["gain"], *one["gain_ci95"])]


def _numbering(results: Results) -> list[str]:
    """Return by how much the value of in-context search is higher with the right numbering, with its interval."""
    right, wrong = (np.array(results[name]["searchers"]["in_context"]["values"]) for name in _NUMBERINGS)
    return [f"{value:.3f}" for value in ((right - wrong).mean(), *bootstrap_interval(right - wrong))]


def _last_values(result: Mapping[str, Any], indices: Sequence[int], place: int = -1) -> list[str]:
    """Return the value of runs by the index of their seed in the rule, at a place of their curves."""
    seeds = {headline_seed(index): index for index in indices}
    values = {seeds.get(run["seed"]): run["curve"][result["metric"]][place] for run in result["runs"]}
    return [f"{values[index]:.3g}" for index in indices]


def _other_weights(results: Results) -> list[str]:
    """Return success on the five seeds of the rule after three pretrainings, and of a network."""
    names = "reward_alone", "reward_alone_tiny", "reward_alone_random", "ppo_mlp"
    return [value for name in names for value in _last_values(results[f"babyai_{name}"], range(5))]


def _weights_differences(results: Results) -> list[str]:
    """Return the mean differences between two references and two other initial weights, with bootstrap intervals."""
    found = list[str]()
    for reference in ("reward_alone", "ppo_mlp"):
        for name in ("reward_alone_tiny", "reward_alone_random"):
            differences = final_values(results[f"babyai_{reference}"]) - final_values(results[f"babyai_{name}"])
            found += [f"{value:.3f}" for value in (differences.mean(), *bootstrap_interval(differences))]
    return found


def _five_distractors(results: Results) -> list[str]:
    """Return the mean success on GoTo and Pickup with five distractors after three pretrainings."""
    tables = (_mean_cells(results, f"babyai_reward_alone{part}_cells") for part in ("_tiny", "_random", ""))
    return [cells[place] for cells in tables for place in (2, 5)]


def _credit(results: Results, kind: str, second: int) -> list[str]:
    """Return success with another credit after 41,000 turns, and the difference from turn credit with its interval.

    The runs from seed ``second`` of the rule on start from the second SFT, and are compared with turn credit from it.
    """
    first = _last_values(results["babyai_ppo_writing"], range(second), place=1)
    turn = [*first, *_last_values(results["babyai_credit_turn"], range(second, 5))]
    return _with_difference(_last_values(results[f"babyai_credit_{kind}"], range(5)), turn)


def _mean_alone(results: Results, name: str) -> list[str]:
    """Return success with an option after 41,000 turns, and the difference from runs without any, with its interval."""
    return _with_difference(*(_last_values(results[one], range(5)) for one in (name, "babyai_means_fixed")))


def _with_difference(values: Sequence[str], base: Sequence[str]) -> list[str]:
    """Return values, and their mean difference from others with its bootstrap interval."""
    differences = np.array(values, dtype=float) - np.array(base, dtype=float)
    return [*values, *(f"{value:.3f}" for value in (differences.mean(), *bootstrap_interval(differences)))]


def _late_values(result: Mapping[str, Any], after: int) -> list[str]:
    """Return the last values of the runs that were measured after a number of env steps."""
    curves = [run["curve"] for run in result["runs"] if run["curve"]["env_steps"][-1] > after]
    return [f"{curve[result['metric']][-1]:.3f}" for curve in curves]


def _random_maps() -> list[str]:
    """Return the mean success of an optimal and of a random policy on 100 maps that do not occur in training."""
    lakes = lakes_of(GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0", kwargs={"split": "test"}), num_maps=100)
    return [f"{np.mean(values):.3f}" for values in ([lake.optimum for lake in lakes], [*map(random_success, lakes)])]


def _lake() -> Lake:
    """Return FrozenLake's 4x4 map."""
    return lakes_of(GymnasiumEnvs("FrozenLake-v1"))[0]


def _cartpole_limits() -> list[str]:
    """Return the env steps of the network and, in thousands, of the language model, and the return that stops it."""
    network, text = (_config(f"cartpole/{name}.yaml") for name in ("ppo_mlp", "ppo_text"))
    data, trainer = text["data"]["init_args"], text["trainer"]
    steps = round(trainer["max_epochs"] * data["num_envs"] * data["num_steps"], -3)
    stop = trainer["callbacks+"][0]["init_args"]["stopping_threshold"]
    return [f"{network['data']['init_args']['max_env_steps']:,}", f"{steps:,}", f"{stop:.0f}"]


_NUMBERINGS = "synthetic_40", "synthetic_40_from_6"
_FIVE_AND_DIFFERENCE = ": {}, {}, {}, {} and {}; difference {} ({} to {})"
_CREDITS = {
    "nested credit": ("nested", 5),
    "bandit credit": ("bandit", 2),
    "GRPO with step groups": ("step", 0),
    "GRPO without step groups": ("episode", 0),
}
"""Estimators of advantages that were compared on BabyAI-Text, with the arguments of :func:`_credit`."""
_MEANS = {
    "the floor of the standard deviation": "babyai_means_floor",
    "the asymmetric clip range": "babyai_means_asymmetric",
    "`update_kl: 0.003` (the configuration)": "babyai_credit_turn",
    "all three": "babyai_means_all",
}
"""Options that were run on BabyAI-Text, as the page names them, and their results."""
_TEMPERATURES = {"1 (as in training)": "", "0.5": "_half", "0 (the most probable action)": "_greedy"}
"""Temperatures at which policies of BabyAI-Text were evaluated, as the page names them, and parts of results' names."""
_MEMORIES = {
    "view only, 1": "",
    "view only, 0": "_greedy",
    "view and last action, 1": "_last_action",
    "view and last action, 0": "_last_action_greedy",
    "view and four last actions, 1": "_last_actions",
    "view and four last actions, 0": "_last_actions_greedy",
}
"""Observations and temperatures of the network on BabyAI, as the page names them, and parts of results' names."""
_LAKE_SHARE = "reaches the goal in {}% of episodes"
_EXPERIMENT = (
    "The first line appears after {} seconds of CPU time. The run takes {} minutes of CPU time and {} GB of memory. "
    "The mean return of {} held-out episodes is then {} ({} with `--seed_everything 1`); that of random actions is {}."
)


def _lake_share(results: Results) -> list[str]:
    return [f"{100 * final_values(results['frozen_lake_grpo_new']).mean():.0f}"]


SENTENCES: Mapping[str, Sequence[Sentence]] = {
    "README.md": (
        Sentence(
            text="A language model with {} million parameters plays slippery FrozenLake after {} collections of GRPO",
            figures=lambda _: [
                f"{_parameters('assets/tiny-lm') / 1e6:.1f}",
                f"{_config('frozen_lake/grpo.yaml')['trainer']['max_epochs']}",
            ],
        ),
        Sentence(text=_LAKE_SHARE, figures=_lake_share),
        Sentence(
            text="trains this model in {} to {} minutes and {} GB of memory",
            figures=lambda results: [
                *_minutes(results["frozen_lake_grpo_new"]),
                f"{results['readme_runs']['runs'][2]['peak_gb']:.1f}",
            ],
        ),
        Sentence(text="evaluates it on {} held-out episodes", figures=lambda _: [f"{PlayOptions().episodes}"]),
        Sentence(
            text="trains a small network on CartPole, in {} seconds and {} GB, to the highest possible return of {}",
            figures=lambda results: [
                f"{60 * max(run['minutes'] for run in results['cartpole_trpo_mlp']['runs']):.0f}",
                _peak_gb(results, "cartpole/trpo_mlp.yaml"),
                _value_of_seed(results["cartpole_trpo_mlp"], 0),
            ],
        ),
        Sentence(text=_EXPERIMENT, figures=_experiment),
        Sentence(
            text="a network that also sees its last four actions\nhas {} with 0 to 5 distractors ({} seeds), and the "
            "model {} ({} seeds)",
            figures=lambda results: [
                figure
                for name in ("ppo_mlp", "reward_alone")
                for values in [final_values(results[f"babyai_{name}_last_actions"])]
                for figure in (f"{values.mean():.2f}", f"{len(values)}")
            ],
        ),
        Sentence(
            text="On CartPole the network had {} steps, and the language model up to {} with a stop at {}",
            figures=lambda _: _cartpole_limits(),
        ),
        Sentence(
            text="text clones of {} rows of HalfCheetah reach one expert, and half the return of another; a network "
            "reaches the first with {} rows",
            figures=lambda results: [
                f"{results[name]['rows']:,}"
                for name in ("half_cheetah_sft_decimals_100000", "half_cheetah_clone_mlp_1000")
            ],
        ),
    ),
    "Makefile": (
        Sentence(
            text="on FrozenLake: {} to {} minutes on two CPU cores",
            figures=lambda results: _minutes(results["frozen_lake_grpo_new"]),
        ),
    ),
    "docs/getting_started.md": (Sentence(text=_EXPERIMENT, figures=_experiment),),
    "docs/gallery.md": (Sentence(text=_LAKE_SHARE, figures=_lake_share),),
    "docs/experiments/frozen_lake.md": (
        Sentence(
            text="The best stationary policy has {}, and a uniformly random policy {}. The optimum is {},",
            figures=lambda _: [
                f"{value:.3f}" for value in (_lake().best_stationary, random_success(_lake()), _lake().optimum)
            ],
        ),
        Sentence(
            text="in training, with an optimum of {} and {} for a random policy", figures=lambda _: _random_maps()
        ),
    ),
    "docs/experiments/babyai.md": (
        Sentence(
            text="10,000 turns have {} and {} there with nested credit",
            figures=lambda results: _late_values(results["babyai_ppo_direct"], after=10_000),
        ),
    ),
    "docs/experiments/lasting.md": (
        Sentence(
            text="turns and end at {}, {} and {}. lrl-2 and lrl-4 pass it after 338,000 and 461,000 and end "
            "at {} and {}",
            figures=lambda results: _last_values(results["babyai_reward_alone"], (0, 1, 3, 2, 4)),
        ),
        Sentence(
            text="lrl-4 `reader-lm` ends at {}, {}, {}, {} and {}, `tiny-lm` at {}, {}, {}, {} and {}, and random\n"
            "weights at {}, {}, {}, {} and {}. The network of the next section has {}, {}, {}, {} and {}.",
            figures=_other_weights,
        ),
        Sentence(
            text="`reader-lm` and `tiny-lm`: {} ({} to {}); `reader-lm` and random weights: {} ({} to {})\n"
            "- the network and `tiny-lm`: {} ({} to {}); the network and random weights: {} ({} to {})",
            figures=_weights_differences,
        ),
        Sentence(
            text="the means are {} and {} on GoTo and Pickup with `tiny-lm`, {} and {}\nwith random weights, and {} "
            "and {} with `reader-lm`",
            figures=_five_distractors,
        ),
        *(
            Sentence(
                text=f"| {temperature} | {{}} | {{}} | {{}} | {{}} | {{}} | {{}} |",
                figures=lambda results, of=of: _mean_cells(results, f"babyai_reward_alone_random{of}_cells"),
            )
            for temperature, of in _TEMPERATURES.items()
        ),
        *(
            Sentence(
                text=f"| {name} | {{}} | {{}} | {{}} | {{}} | {{}} | {{}} |",
                figures=lambda results, of=of: _mean_cells(results, f"babyai_ppo_mlp{of}_cells"),
            )
            for name, of in _MEMORIES.items()
        ),
        Sentence(
            text="It ends at {}, {}, {}, {} and\n{}; the mean of the five differences is {} ({} to {}, bootstrap over",
            figures=lambda results: _with_difference(
                *(_last_values(results[f"babyai_ppo_mlp{of}"], range(5)) for of in ("_last_action", ""))
            ),
        ),
        Sentence(
            text="It ends at {}, {}, {}, {} and\n{}; the mean of the five differences from the last action alone is {} "
            "({} to {}, bootstrap over",
            figures=lambda results: _with_difference(
                *(_last_values(results[f"babyai_ppo_mlp{of}"], range(5)) for of in ("_last_actions", "_last_action"))
            ),
        ),
        Sentence(
            text="turn credit (the runs above) has {}, {}, {}, {} and {} of 200 held-out episodes after 41,000 turns",
            figures=lambda results: _last_values(results["babyai_ppo_writing"], range(5), place=1),
        ),
        Sentence(
            text="After this SFT, turn credit has {}, {}, {}, {} and {}",
            figures=lambda results: _last_values(results["babyai_credit_turn"], range(5)),
        ),
        *(
            Sentence(text=f"- {name}{_FIVE_AND_DIFFERENCE}", figures=lambda results, of=of: _credit(results, *of))
            for name, of in _CREDITS.items()
        ),
        Sentence(
            text="- none, with a fixed learning rate: {}, {}, {}, {} and {}",
            figures=lambda results: _last_values(results["babyai_means_fixed"], range(5)),
        ),
        *(
            Sentence(text=f"- {name}{_FIVE_AND_DIFFERENCE}", figures=lambda results, of=of: _mean_alone(results, of))
            for name, of in _MEANS.items()
        ),
        Sentence(
            text="The mean of the five differences is {} ({} to {}, bootstrap over seeds; {} to {}, t distribution)",
            figures=_network,
        ),
        Sentence(
            text="The means of the five seeds, {}, {} and {} on GoTo and {}, {} and {} on Pickup",
            figures=lambda results: _mean_cells(results, "babyai_reward_alone_cells"),
        ),
    ),
    "docs/experiments/smollm2.md": (
        Sentence(text="The optimum of FrozenLake is {}.", figures=lambda _: [f"{_lake().optimum:.3f}"]),
        Sentence(
            text="are {} for SmolLM2 and {} for random weights. The difference of {} ({} to {}) comes",
            figures=lambda results: [
                *(
                    f"{final_values(results[name]).mean():.0f}"
                    for name in ("cartpole_smollm2", "cartpole_smollm2_random")
                ),
                *_difference(results, "cartpole_smollm2", "cartpole_smollm2_random"),
            ],
        ),
    ),
    "docs/experiments/synthetic.md": (
        Sentence(text="lower by {} (95% interval of this difference: {} to {};", figures=_numbering),
        Sentence(
            text="had a gain over random search of {} ({} to {};",
            figures=lambda results: _gain(results["synthetic_40_first"]),
        ),
    ),
}
"""Sentences with figures by page."""

NOT_MEASURED = ("135 million parameters", "90 seconds")
"""Parts of the README's sentences whose numbers are no results: a name of a model, and the goal of `make test-fast`."""

UNCHECKED: Mapping[str, Sequence[str]] = {
    "docs/benchmarks.md": ("0.67 (0.66 to 0.86)", "0.740"),
    "docs/guides/api_models.md": ("0.70 (0.48 to 0.86)",),
    "docs/experiments/babyai.md": ("the clone has 0.705",),
    "docs/experiments/cartpole.md": ("loss 0.082", "loss 0.060"),
    "docs/experiments/frozen_lake.md": ("0.675 of random actions", "ten tables has 0.689", "0.903", "0.949"),
    "docs/experiments/half_cheetah.md": ("0.567 per token", "divergence was 0.002"),
    "docs/experiments/lasting.md": ("0.002 to 0.007 nats", "exact success is 0.740", "0.015 nats", "0.011 nats"),
    "docs/experiments/smollm2.md": ("from 0.009 to 0.002", "0.038", "0.034 to 0.040"),
    "docs/experiments/synthetic.md": ("-0.168 against -0.223, with a paired gain of 0.054 (0.039 to 0.070)",),
}
"""Figures by page that no table has: most were read while a run was training, and have no kept record."""


def fill_sentences(page: str, text: str, results: Results) -> str:
    """Return the text of a page with new numbers in its :data:`SENTENCES`.

    Args:
        page: path of the page from the repository's root.
        text: current text of the page.
        results: kept results by name.

    Raises:
        ValueError: If the page does not have a sentence exactly once.
    """
    for sentence in SENTENCES.get(page, ()):
        (found,) = _matches(page, text, sentence)
        for number, figure in reversed([*enumerate(sentence.figures(results), 1)]):
            text = text[: found.start(number)] + figure + text[found.end(number) :]
    return text


def _matches(page: str, text: str, sentence: Sentence) -> list[re.Match[str]]:
    """Return the only place of a sentence in a page, as a list.

    Raises:
        ValueError: If there are several places, or none.
    """
    parts = (r"\s+".join(map(re.escape, part.split(" "))) for part in sentence.text.split("{}"))
    found = [*re.finditer(f"({_NUMBER})".join(parts), text)]
    if len(found) != 1:
        raise ValueError(
            f"{page} has the sentence {sentence.text!r} {len(found)} times; it must have it once, or SENTENCES must be "
            "changed."
        )
    return found


def figure_faults(page: str, text: str) -> list[str]:
    """Return a sentence about each figure in the prose of a page that is not computed.

    In the README it is each number, apart from :data:`NOT_MEASURED`. In other pages it is each figure with an interval
    or with values of seeds that is not in a generated table of the page, and in pages with such tables each number with
    three decimals, apart from :data:`UNCHECKED`.

    Args:
        page: path of the page from the repository's root.
        text: text of the page.
    """
    known = "".join(_TABLES.findall(text))
    for sentence in SENTENCES.get(page, ()):
        (found,) = _matches(page, text, sentence)
        known += " ".join(found[0].split())
        text = text[: found.start()] + text[found.end() :]
    prose = _CODE.sub(" ", _TABLES.sub("", text)).splitlines()
    prose = " ".join(" ".join(line for line in prose if not line.startswith("|")).split())
    for part in (*UNCHECKED.get(page, ()), *(NOT_MEASURED if page == "README.md" else ())):
        prose = prose.replace(part, "")
    faults = [f for f in (f"{found[1]} ({found[2]})" for found in _SPREAD.finditer(prose)) if f not in known]
    numbers = set(re.findall(_NUMBER, known))
    if _TABLES.search(text):
        faults += [number for number in _EXACT.findall(prose) if number not in numbers]
    if page == "README.md":
        faults += re.findall(rf"(?<![\w.,-]){_NUMBER}%?(?![\w-])", prose)
    return [f"{page} has {one}, which neither its tables nor results.sentences.SENTENCES have." for one in faults]
