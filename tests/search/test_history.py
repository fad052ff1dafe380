"""Tests of the selection and the format of policies in prompts."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from lrl.search.prompted import parse_parameters
from lrl.search.prompts import Entry, HistoryConfig, render_reply, render_value, same_parameters
from lrl.search.searchers import ParameterSpace, Trial

SPACE = ParameterSpace(size=2)
ENTRIES = [Entry((float(i), -0.5), value, 20) for i, value in enumerate([3.0, 9.0, 1.0, 9.0, 4.0, 2.0])]


def shown(**settings):
    return [int(entry.parameters[0]) for entry in HistoryConfig(**settings).selected(ENTRIES)]


def test_all_policies_are_shown_in_order_of_time_unless_some_are_selected():
    assert shown() == [0, 1, 2, 3, 4, 5]
    assert shown(recent=2) == [4, 5]
    assert shown(recent=0, top_k=3) == [1, 3, 4]
    assert shown(recent=2, top_k=2) == [1, 3, 4, 5]  # the best of those before the recent ones
    assert shown(recent=3, top_k=2) == [0, 1, 3, 4, 5]
    assert shown(recent=9) == shown()


def test_in_order_of_value_the_best_policies_are_last_and_the_oldest_of_equals_is_the_best():
    assert shown(order="value") == [2, 5, 0, 4, 3, 1]
    assert shown(recent=2, top_k=1, order="value") == [5, 4, 1]


def test_a_line_contains_the_number_of_episodes_of_the_mean():
    entries = [Entry((1.0, -0.5), 23.456, 20), Entry((0.0, 6.0), -1.0, 1)]
    assert HistoryConfig().render(entries, SPACE).splitlines() == [
        "params[0]: 1.0; params[1]: -0.5; f(params): 23.46 (mean of 20 episodes)",
        "params[0]: 0.0; params[1]: 6.0; f(params): -1.00 (1 episode)",
    ]
    assert HistoryConfig(style="compact").render(entries, SPACE) == "1.0 -0.5 = 23.46 (20)\n0.0 6.0 = -1.00 (1)"


def test_values_are_written_with_the_decimals_of_the_space():
    assert render_value(3.0, ParameterSpace(size=1, actions=(0, 3))) == "3"
    assert render_value(1.23456789, ParameterSpace(size=1, decimals=None)) == "1.2346"
    assert render_value(-2.5, ParameterSpace(size=1, decimals=2)) == "-2.50"


def test_the_last_trajectories_follow_their_policies():
    steps = (("0", "1", 0.0), ("4", "1", 1.0))
    entries = [Entry((float(i), 0.0), 0.0, 1, steps) for i in range(3)]
    text = HistoryConfig(trajectories=1).render(entries, SPACE)
    assert text.splitlines()[2:] == [
        "params[0]: 2.0; params[1]: 0.0; f(params): 0.00 (1 episode)",
        "State | Action | Reward",
        "0 | 1 | 0",
        "4 | 1 | 1",
    ]
    assert "State" not in HistoryConfig().render(entries, SPACE)


def test_an_entry_is_restored_from_plain_values_and_holds_the_first_steps():
    trajectory = [(str(i), "0", 0.5) for i in range(150)]
    trial = Trial(parameters=np.array([1.0, 2.0]), returns=np.array([1.0, 2.0]), env_steps=9, trajectory=trajectory)
    entry = Entry.of(trial)
    assert (entry.value, entry.episodes, len(entry.trajectory)) == (1.5, 2, 100)
    assert Entry.restored(json.loads(json.dumps(asdict(entry)))) == entry
    assert same_parameters([entry], np.array([1.0, 2.0])) is entry
    assert same_parameters([entry], np.array([1.0, 2.1])) is None


def test_a_history_that_shows_nothing_is_an_error():
    with pytest.raises(ValueError, match="recent is 0 and top_k is 0; .* one of them must be positive"):
        HistoryConfig(recent=0)


def test_top_k_without_recent_is_an_error_because_all_policies_are_shown():
    with pytest.raises(
        ValueError, match="recent is null and top_k is 20; recent must be a number where top_k is given"
    ):
        HistoryConfig(top_k=20)


def test_the_oldest_or_the_worst_policies_are_left_out_but_never_the_best():
    def fewer(most, **settings):
        return [int(entry.parameters[0]) for entry in HistoryConfig(**settings).selected(ENTRIES, most)]

    assert [fewer(most) for most in (6, 4, 2, 1)] == [[0, 1, 2, 3, 4, 5], [1, 3, 4, 5], [1, 5], [1]]
    assert [fewer(most, order="value") for most in (6, 3, 1)] == [[2, 5, 0, 4, 3, 1], [4, 3, 1], [1]]
    assert len(HistoryConfig().render(ENTRIES, SPACE, 2).splitlines()) == 2


@pytest.mark.parametrize("style", ["indexed", "compact", "integers"])
def test_a_written_reply_is_parsed_to_the_same_parameters(style):
    parameters = np.array([0.5, -6.0])
    text = render_reply(parameters, SPACE, style)
    if style == "integers":
        assert text == "65"
    else:
        assert parse_parameters(text, SPACE) == parameters.tolist()
