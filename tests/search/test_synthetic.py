"""Tests of synthetic functions, of the integers in histories, and of demonstrations."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from search_runs import train_to_search

from lrl.chat.model import ChatModel, Completion
from lrl.search import synthetic
from lrl.search.prompted import PromptedSearcher, ProposalError
from lrl.search.prompts import (
    Entry,
    HistoryConfig,
    from_integers,
    integer_prompt,
    integer_space,
    ranks,
    read_integers,
    to_integers,
)
from lrl.search.searchers import CMAES, ParameterSpace, RandomSearch
from lrl.search.synthetic import (
    HISTORY,
    KINDS,
    REAL_KINDS,
    REAL_SIZES,
    TABLE_KINDS,
    TABLE_SIZES,
    SyntheticHistories,
    TableFunction,
    change,
    demonstrations,
    sample_function,
    teach,
)
from lrl.search.synthetic_comparison import compare_searchers, search_function


def test_integers_count_tenths_from_the_lower_end_of_the_range():
    space = ParameterSpace(size=4)
    assert to_integers([-6.0, 0.0, 1.3, 6.0], space) == [0, 60, 73, 120]
    assert from_integers([0, 60, 73, 120], space).tolist() == [-6.0, 0.0, 1.3, 6.0]
    assert (integer_space(space).low, integer_space(space).high) == (0, 120)
    table = ParameterSpace(size=2, actions=(1, 2, 3))
    assert to_integers([3, 1], table) == [3, 1] and from_integers([3, 1], table).tolist() == [3, 1]
    assert integer_space(table) == table
    for decimals in (None, 2):
        with pytest.raises(ValueError, match=f"decimals is {decimals} for parameters from -6 to 6"):
            integer_space(ParameterSpace(size=1, decimals=decimals))


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        (["75", "4 1", "1"], "reply for params\\[1\\] is '4 1'; it must be an integer"),
        (["75", "40", ""], "params\\[2\\] is ''"),
        (["75", "\x1e93", "1"], "params\\[1\\] is '\\\\x1e93'; it must be an integer"),
        (["-75", "40", "1"], "params\\[0\\] is '-75'"),
        (["75", "400", "1"], "params\\[1\\] is 400; it must be between 0 and 120"),
        (["75", "40"], "2 values were given; there must be 3"),
    ],
)
def test_replies_that_are_not_integers_are_rejected(replies, said):
    assert read_integers(["75", " 0\n", "120"], ParameterSpace(size=3)).tolist() == [1.5, -6.0, 6.0]
    with pytest.raises(ProposalError, match=said):
        read_integers(replies, ParameterSpace(size=3))


def test_ranks_go_from_0_to_99_and_equal_values_share_theirs():
    assert ranks([5.0, -1e9, 6.0]) == [50, 0, 99]
    assert ranks([1.0, 1.0, 1.0]) == [50, 50, 50] and ranks([3.0]) == [99] and ranks([]) == []
    assert ranks([0.0, 0.0, 1.0]) == [25, 25, 99]


def test_a_history_of_integers():
    entries = [Entry((0.0, 1.0), 2.0, 20), Entry((-6.0, 6.0), 1.0, 20)]
    history = HistoryConfig(order="value", style="integers").render(entries, ParameterSpace(size=2))
    assert history == "0=0 60=99"
    second = HistoryConfig(order="value", style="integers").render(entries, ParameterSpace(size=2), parameter=1)
    assert second == "120=0 70=99"
    prompt = integer_prompt(ParameterSpace(size=2), history, 3, 9)
    assert prompt == "2 numbers from 0 to 120, 3 of 9:\n0=0 60=99"
    assert integer_prompt(ParameterSpace(size=2, actions=(0, 2)), "", 1, 9) == "2 numbers from 0 2, 1 of 9:"
    with pytest.raises(ValueError, match="trajectories is 1, but style is integers"):
        HistoryConfig(style="integers", trajectories=1)


@pytest.mark.parametrize("index", range(2 * len(KINDS)))
def test_functions_have_their_maximum_at_the_optimum_and_a_common_scale(index):
    function, rng = sample_function(3, index), np.random.default_rng(0)
    assert function.kind == KINDS[index % 7]
    fewest, most = REAL_SIZES if function.kind in REAL_KINDS else TABLE_SIZES
    assert fewest <= function.space.size <= most
    assert (function.space.actions is None) == (function.kind in REAL_KINDS)
    random = np.stack([function.space.sample(rng) for _ in range(500)])
    values = function.values(random)
    assert function.values(function.optimum[None])[0] == pytest.approx(0, abs=1e-12) and values.max() <= 0
    assert -2 < values.mean() < -0.3
    assert function.space.complaint(function.optimum.tolist()) == ""
    if function.kind == "steps":
        assert np.allclose(values * 8, np.round(values * 8))
    measured = function.measure(random[0], rng, 20_000)
    assert measured.value == pytest.approx(values[0], abs=0.01) and measured.returns.std() == pytest.approx(
        function.error, abs=0.01
    )


def test_held_out_functions_differ_and_sampling_is_reproducible():
    first, again, held_out = sample_function(0, 7), sample_function(0, 7), sample_function(0, 7, held_out=True)
    assert np.array_equal(first.shape, again.shape)
    assert first.shape.shape != held_out.shape.shape or not np.allclose(first.shape, held_out.shape)


def of_kind(kind):
    """Return a small function of a table."""
    start, step = KINDS.index(kind), len(KINDS)
    functions = (sample_function(0, index) for index in range(start, 1000, step))
    return next(one for one in functions if one.num_actions**one.space.size <= 4096)


@pytest.mark.parametrize("kind", ["independent", "pairs", "leading"])
def test_no_table_has_a_higher_value_than_the_optimum(kind):
    function = of_kind(kind)
    tables = np.array(list(itertools.product(function.space.actions, repeat=function.space.size)), dtype=float)
    values = function.values(tables)
    assert values.max() == pytest.approx(0, abs=1e-12)
    assert function.values(function.optimum[None])[0] == pytest.approx(0, abs=1e-12)
    assert values.mean() == pytest.approx(-1, abs=1e-9 if kind != "leading" else 0.25)


def test_entries_are_independent_or_in_pairs_or_count_after_all_previous_ones():
    losses = np.array([[0.0, 1.0], [2.0, 0.0]])
    alone = TableFunction(
        kind="independent", optimum=np.array([2.0, 1.0]), error=0.0, num_actions=2, first_action=1,
        order=np.array([1, 0]), losses=losses,
    )  # fmt: skip
    tables = np.array([[2, 1], [2, 2], [1, 1], [1, 2]], dtype=float)
    assert alone.values(tables).tolist() == [0, -1, -2, -3], "the first group is the second entry"
    paired = replace(alone, kind="pairs", losses=np.array([[[0.0, 1.0], [2.0, 3.0]]]))
    assert paired.values(tables).tolist() == [-1, -3, 0, -2], "rows are actions of the second entry"
    leading = replace(alone, kind="leading", losses=np.empty(0))
    assert leading.values(tables).tolist() == [0, -1, -0.5, -1], "the second entry counts first"


def test_changed_parameters_are_legal_and_differ():
    rng, real = np.random.default_rng(0), ParameterSpace(size=3)
    changed = [change(np.full(3, 5.9), real, rng) for _ in range(20)]
    assert all(real.complaint(one.tolist()) == "" for one in changed) and len({tuple(one) for one in changed}) > 10
    table, before = ParameterSpace(size=20, actions=(1, 2, 3)), np.ones(20)
    after = np.stack([change(before, table, rng) for _ in range(300)])
    assert set(np.unique(after)) == {1, 2, 3} and 0.5 < (after != before).sum(1).mean() < 2.5


def test_histories_never_contain_all_values_of_a_small_table(monkeypatch):
    """A table of six entries with two actions each has 64 policies; histories may be longer."""
    monkeypatch.setattr(synthetic, "_ITERATIONS", (400, 400))
    monkeypatch.setattr(synthetic, "_ROWS", 8)
    small = [
        index
        for index in range(2000)
        if (one := sample_function(0, index)).kind in TABLE_KINDS and one.num_actions**one.space.size <= 128
    ]
    totals = [
        int(row["prompt"].splitlines()[0].rstrip(":").rpartition(" ")[2])
        for row in demonstrations(0, range(small[0], small[0] + 1))
    ]
    assert totals and max(totals) <= 32


def test_the_teacher_improves_with_generations_and_repeats_no_proposal():
    gaps = {}
    for generations in (0, 2, 8):
        gaps[generations] = []
        for index in range(28):
            function, rng = sample_function(1, index), np.random.default_rng(index)
            entries = [Entry.of(function.measure(function.space.sample(rng), rng)) for _ in range(5)]
            tried = {entry.parameters for entry in entries}
            taught = teach(function, entries, tried, rng, generations)
            assert tuple(taught) not in tried
            assert function.space.complaint(taught.tolist()) == ""
            gaps[generations].append(function.values(taught[None])[0])
    means = [np.mean(gaps[generations]) for generations in (0, 2, 8)]
    assert means[0] < means[1] < means[2] and means[2] > 0.6 * means[0]


@pytest.mark.slow
def test_demonstrations_are_prompts_of_the_searcher_with_legal_responses():
    rows = list(demonstrations(0, range(14)))
    assert rows == list(demonstrations(0, range(14))) and len(rows) > 14
    for row in rows:
        head, history = row["prompt"].splitlines()
        iteration, total = (int(word) for word in head.rstrip(":").split(", ")[1].split(" of "))
        pairs = [tuple(map(int, pair.split("="))) for pair in history.split(" ")]
        assert 1 <= iteration <= total <= 400 and 1 <= len(pairs) <= 20
        places = [place for _, place in pairs]
        assert places == sorted(places) and all(0 <= place <= 99 for place in places), "the best comes last"
        legal = head.split(" from ")[1].split(",")[0]
        actions = None if " to " in legal else tuple(map(int, legal.split(" ")))
        for value in (int(row["response"]), *(value for value, _ in pairs)):
            assert read_integers([str(value)], ParameterSpace(size=1, actions=actions)).shape == (1,)
    assert rows != list(demonstrations(0, range(14), held_out=True))


def test_a_demonstrated_proposal_has_a_row_per_parameter_up_to_four(monkeypatch):
    monkeypatch.setattr(synthetic, "_ROWS", 1)
    for index in range(len(KINDS)):
        rows = list(demonstrations(0, range(index, index + 1)))
        assert len(rows) == min(4, sample_function(0, index).space.size)
        assert len({row["prompt"].splitlines()[0] for row in rows}) == 1


def test_cma_es_outperforms_random_search_on_held_out_functions():
    figures = compare_searchers({"random_search": RandomSearch, "cma_es": CMAES}, 0, range(28), 5, 100)
    assert figures["random_search"]["gain"] == 0 and figures["random_search"]["better_share"] == 0
    assert figures["cma_es"]["gain"] > 0.03 and figures["cma_es"]["better_share"] > 0.6
    assert figures["cma_es"]["value"] == pytest.approx(np.mean(figures["cma_es"]["values"]))
    real = [value for index, value in enumerate(figures["cma_es"]["values"]) if index % 7 < 4]
    assert figures["cma_es"]["real"]["value"] == pytest.approx(np.mean(real)) and "tables" in figures["cma_es"]


def test_the_best_so_far_is_selected_by_measured_values():
    function = sample_function(0, 4, held_out=True)
    exact = search_function(RandomSearch(), function, 0, 3, 20)
    assert len(exact) == 23 and exact.max() <= 0
    if function.error == 0:
        assert (np.diff(exact) >= 0).all()


class Centre(ChatModel):
    """Chat model whose replies depend on the parameter and the number of the request, and which records requests."""

    name = "centre"

    def __init__(self):
        self.prompts, self.seeds = [], []

    def complete(self, conversations, sampling, seeds):
        self.prompts.append([conversation[-1]["content"] for conversation in conversations])
        self.seeds += seeds
        texts = [str(60 + len(self.prompts) + place) for place in range(len(conversations))]
        return [Completion(text=text, finish_reason="stop", prompt_tokens=1, completion_tokens=1) for text in texts]


def test_the_searcher_writes_and_reads_integers():
    model, function = Centre(), sample_function(0, 0)
    searcher = PromptedSearcher(model, history=HISTORY)
    search_function(searcher, function, 0, 4, 3)
    proposals = [entry.parameters for entry in searcher.entries[4:]]
    size = function.space.size
    for number, proposal in enumerate(proposals, 1):
        np.testing.assert_allclose(proposal, (number + np.arange(size)) / 10)
    assert len(set(model.seeds)) == 3 * size, "each parameter has a seed of its own"
    assert [len(prompts) for prompts in model.prompts] == [function.space.size] * 3, "all parameters at once"
    shown = searcher.history.selected(searcher.entries[:6])
    for parameter, prompt in enumerate(model.prompts[2]):
        head, history = prompt.splitlines()
        assert head == f"{function.space.size} numbers from 0 to 120, 3 of 3:"
        values = [int(pair.split("=")[0]) for pair in history.split(" ")]
        assert values == [round(10 * (entry.parameters[parameter] + 6)) for entry in shown]


def test_validation_functions_differ_from_the_functions_of_comparisons(tmp_path):
    from lrl.search.synthetic_command import main

    compared = {row["prompt"] for row in demonstrations(0, range(2), held_out=True)}
    made = {row.observation for row in SyntheticHistories(2, held_out=True).load(None, None)}
    main("x", f"--write {tmp_path}/held_out.jsonl --functions 2 --held_out".split())
    written = {json.loads(line)["prompt"] for line in (tmp_path / "held_out.jsonl").read_text().splitlines()}
    assert made == written and made and not made & compared
    assert not made & {row["prompt"] for row in demonstrations(0, range(2))}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--write x --checkpoint y", "--checkpoint is given with --write, where it would be ignored."),
        ("--write x --json y", "--json is given with --write"),
        ("--write x --iterations 40", "--iterations is given with --write"),
        ("--held_out", "--held_out is given without --write"),
        ("--iterations 0", "--iterations is 0; it must be at least 1."),
    ],
)
def test_options_that_would_be_ignored_raise_one_sentence(options, said, capsys):
    from lrl.search.synthetic_command import main

    with pytest.raises(SystemExit) as stop:
        main("lrl synthetic_search", options.split())
    assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_demonstrations_for_training_and_compares_the_run(tmp_path, monkeypatch, capsys):
    import sys

    from lrl.search.synthetic_command import main

    main("x", f"--write {tmp_path}/histories.jsonl --functions 8".split())
    rows = [json.loads(line) for line in (tmp_path / "histories.jsonl").read_text().splitlines()]
    assert rows == list(demonstrations(0, range(8)))
    made = SyntheticHistories(8).load(None, None)
    assert [{"prompt": one.observation, "response": one.response} for one in made] == rows
    run = tmp_path / "run"
    train_to_search(run)
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    main("x", f"--functions 2 --iterations 2 --checkpoint {run} --json {tmp_path}/out.json".split())
    table = capsys.readouterr().out
    searchers = ["random search", "CMA-ES", "in-context search"]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [f"| {searcher}" for searcher in searchers]
    assert set(json.loads((tmp_path / "out.json").read_text())["searchers"]) == {
        "random_search",
        "cma_es",
        "in_context",
    }
