"""Figures of episodes as one metric of torchmetrics."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from lrl.evaluation.episodes import EpisodeMetrics, EpisodeResults, merge
from lrl.evaluation.report import results_table


def results(*episodes):
    """Episodes as (return, length, success, invalid actions)."""
    columns = list(zip(*episodes, strict=True)) or [()] * 4
    return EpisodeResults(
        seed=0,
        index=np.arange(len(episodes)),
        returns=np.array(columns[0], dtype=float),
        lengths=np.array(columns[1], dtype=np.int64),
        successes=np.array(columns[2], dtype=bool),
        invalid_actions=np.array(columns[3], dtype=np.int64),
        seconds=1.0,
    )


PLAYED = [(1.0, 4, True, 0), (0.0, 6, False, 3), (-0.5, 2, False, 0)]
FIGURES = {"return": 0.5 / 3, "length": 4.0, "success_rate": 1 / 3, "invalid_action_rate": 0.25}


def test_figures_are_means_over_episodes_and_the_share_of_turns():
    metrics = EpisodeMetrics()
    metrics.update(results(*PLAYED[:1]))
    metrics.update(results(*PLAYED[1:]))
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(FIGURES)
    assert results(*PLAYED).means() == pytest.approx(FIGURES)


def test_ranks_are_reduced_by_sums_also_where_one_played_nothing():
    ranks = [EpisodeMetrics(), EpisodeMetrics(), EpisodeMetrics()]
    for rank, episodes in zip(ranks, (PLAYED[:1], PLAYED[1:], []), strict=True):
        rank.update(results(*episodes))
    states = [[getattr(rank, name) for rank in ranks] for name in ranks[0].metric_state]
    gathered = iter(states)
    ranks[2].distributed_available_fn = lambda: True
    ranks[2].dist_sync_fn = lambda tensor, group=None: next(gathered)
    assert {name: float(value) for name, value in ranks[2].compute().items()} == pytest.approx(FIGURES)


def test_without_reported_success_there_is_no_success_rate():
    unjudged = replace(results(*PLAYED), has_success=False)
    assert unjudged.means() == pytest.approx({k: v for k, v in FIGURES.items() if k != "success_rate"})
    assert set(unjudged.intervals()) == set(unjudged.means())
    report = unjudged.report("id", "policy")
    assert report["success_rate"] is None and report["success_ci95"] == [None, None]
    assert "success" not in report["per_episode"][0] and "success" in results(*PLAYED).report("", "")["per_episode"][0]
    assert merge([unjudged, replace(unjudged, index=unjudged.index + 3)]).has_success is False
    assert "none" in printed({"policy": unjudged})


def printed(rows):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table(rows, "title"))
    return console.export_text()


def test_every_state_is_a_sum_in_double_precision():
    metrics = EpisodeMetrics()
    assert all(value.dtype == torch.float64 for value in metrics.half().metric_state.values())
    assert all(reduction.__name__ == "dim_zero_sum" for reduction in metrics._reductions.values())
