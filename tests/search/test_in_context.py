"""Tests of the search by a language model on the tasks: budget, prompts and records."""

import json

import numpy as np
import pytest
from search_runs import train_to_search

from lrl.chat.model import ChatModel, Completion
from lrl.search.experiments import UNPLAYABLE, SearchRun, planned, search
from lrl.search.in_context import InContextSearcher, UnplayableError
from lrl.search.searchers import ParameterSpace, RandomSearch, Trial
from lrl.search.synthetic import FIRST_VALIDATION, sample_function
from lrl.search.synthetic_comparison import search_function
from lrl.search.table_command import main
from lrl.search.tasks import IN_CONTEXT, SearchBudget

SMALL = SearchBudget(iterations=8, rollouts=2, fresh_episodes=3, checkpoint="a run")


class Scripted(ChatModel):
    """Chat model that replies with an integer or a word, depending on the seed, and limits the prompt in words."""

    name = "scripted"

    def __init__(self, usable=True, words=10**6):
        self.usable, self.words, self.prompts = usable, words, []

    def fits(self, conversation, sampling, response=""):
        return len(conversation[-1]["content"].split()) <= self.words

    def complete(self, conversations, sampling, seeds):
        self.prompts.append([conversation[-1]["content"] for conversation in conversations])
        texts = [str(np.random.default_rng(seed).integers(1, 4)) if self.usable else "no" for seed in seeds]
        return [Completion(text=text, finish_reason="stop", prompt_tokens=1, completion_tokens=1) for text in texts]


def ask_all(searcher, space, count, seed=3):
    searcher.setup(space, seed, count)
    found = []
    for _ in range(count):
        found.append(searcher.ask())
        searcher.tell(Trial(parameters=found[-1], returns=np.array([found[-1].sum()]), env_steps=1))
    return found


def test_the_first_proposals_equal_those_of_random_search_and_later_ones_are_requested():
    space, model = ParameterSpace(size=3), Scripted()
    found, random = (ask_all(one, space, 8) for one in (InContextSearcher(model), RandomSearch()))
    np.testing.assert_array_equal(found[:5], random[:5])
    assert len(model.prompts) == 3 and model.prompts[0][0].startswith("3 numbers from 0 to 120, 1 of 3:\n")
    assert [prompts[2].count("=") for prompts in model.prompts] == [5, 6, 7]
    assert all((one >= -5.9).all() and (one <= -5.7).all() for one in found[5:]), "1 to 3 tenths above -6"


def test_proposals_stay_random_until_two_returns_differ():
    space, model, random, found = ParameterSpace(size=3), Scripted(), RandomSearch(), []
    searcher = InContextSearcher(model)
    searcher.setup(space, 3, 12)
    for trial in range(10):
        found.append(searcher.ask())
        searcher.tell(Trial(parameters=found[-1], returns=np.array([float(trial == 7)]), env_steps=1))
    np.testing.assert_array_equal(found[:8], ask_all(random, space, 8))
    assert [prompts[0].count("=") for prompts in model.prompts] == [8, 9], "asked after the eighth return, not before"
    first = [prompts[0].partition(":")[0] for prompts in model.prompts]
    assert first == ["3 numbers from 0 to 120, 4 of 7", "3 numbers from 0 to 120, 5 of 7"], "counted as in training"


def test_warm_up_policies_do_not_count_as_proposals_in_prompts():
    model, function = Scripted(), sample_function(0, FIRST_VALIDATION, held_out=True)
    search_function(InContextSearcher(model, warmup=0), function, 3, warmup=5, iterations=40)
    heads = [prompts[0].partition(":")[0].partition(", ")[2] for prompts in model.prompts]
    assert list(dict.fromkeys(heads)) == [f"{place} of 40" for place in range(1, 41)], "as in the demonstrations"
    assert model.prompts[0][0].count("=") == 5, "but their returns are shown"


def test_a_restored_search_makes_the_same_proposals():
    space = ParameterSpace(size=2, actions=(1, 2, 3))
    whole = ask_all(InContextSearcher(Scripted()), space, 7)
    for count in (3, 6):
        part, rest = InContextSearcher(Scripted()), InContextSearcher(Scripted())
        ask_all(part, space, count)
        part.num_iterations = 7
        rest.setup(space, 3, 7)
        rest.load_state_dict(json.loads(json.dumps(part.state_dict())))
        np.testing.assert_array_equal(rest.ask(), whole[count])


def test_a_record_counts_random_proposals_and_unusable_replies(monkeypatch):
    model = Scripted()
    monkeypatch.setattr("lrl.search.experiments.chat_model_of", lambda checkpoint: model)
    record = search(SearchRun("cart_pole", IN_CONTEXT, 1), SMALL)
    assert record["episodes"] == 16 and len(record["values"]) == 8 and record["failed"] == 0
    assert record["warmup"] == 5 and record["checkpoint"] == "a run" and len(model.prompts) == 3
    model.usable = False
    assert search(SearchRun("cart_pole", IN_CONTEXT, 1), SMALL)["failed"] == 3


def test_a_task_that_does_not_fit_into_the_prompt_is_recorded_as_unplayable(monkeypatch):
    model = Scripted(words=20)
    monkeypatch.setattr("lrl.search.experiments.chat_model_of", lambda checkpoint: model)
    assert UNPLAYABLE not in search(SearchRun("nim", IN_CONTEXT, 0), SMALL)
    model.words = 1
    record = search(SearchRun("nim", IN_CONTEXT, 0), SMALL)
    assert "has no room for a prompt with one value of a parameter" in record[UNPLAYABLE]
    assert not {"best_iteration", "fresh", "values"} & set(record)
    with pytest.raises(UnplayableError, match="no room"):
        InContextSearcher(Scripted(words=1)).setup(ParameterSpace(size=2), 0, 9)


def test_the_search_has_the_seeds_of_other_searches():
    assert len(planned(["maze", "hopper"], [IN_CONTEXT])) == 10 + 3


@pytest.mark.slow
def test_the_command_runs_the_search_of_a_checkpoint_with_the_others(tmp_path, capsys):
    run = tmp_path / "run"
    train_to_search(run)
    words = f"--folder {tmp_path}/records --tasks maze pong --methods random_search in_context --checkpoint {run}"
    words += " --iterations 6 --rollouts 1 --fresh_episodes 2 --seeds 1"
    main("lrl search_table", [*words.split(), "--json", str(tmp_path / "all.json")])
    assert capsys.readouterr().out.count("seconds") == 4
    report = json.loads((tmp_path / "all.json").read_text())
    assert {record["episodes"] for record in report["searches"]} == {6}
    assert all(record["failed"] <= 1 for record in report["searches"] if record["method"] == IN_CONTEXT)
    with pytest.raises(SystemExit):
        main("lrl search_table", [*words.replace(str(run), str(tmp_path)).split(), "--show"])
    assert "--checkpoint is " in capsys.readouterr().err
