"""Tests of ``lrl compare`` on run directories and on kept results."""

import json

import pytest
from commands import run_words


def compare(*words):
    return run_words(["python", "-m", "lrl", "compare", *map(str, words)])


@pytest.fixture
def runs(tmp_path):
    """Makes run directories: ``runs(name, {seed: final value})``."""

    def make(name, values, metric="val/success_rate", loss="train/loss", **settings):
        for seed, value in values.items():
            run = tmp_path / name / f"seed{seed}"
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(json.dumps({"seed_everything": seed, "model": settings}))
            (run / "metrics.csv").write_text(f"clock/env_steps,{metric},{loss}\n10,0.0,\n20,{value},\n20,,0.3\n")
        return sorted((tmp_path / name).iterdir())

    return make


def test_runs_are_paired_by_the_seed_of_their_configuration(runs):
    ours = runs("ours", {1: 0.9, 2: 0.8, 3: 0.7, 4: 1.0, 5: 0.6, 6: 0.5})
    theirs = runs("theirs", {2: 0.7, 1: 0.6, 3: 0.5, 5: 0.5, 4: 0.7, 7: 1.0, 8: 1.0})
    done = compare(*ours, "--baseline", *theirs, "--metric", "val/success_rate")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[4:9] == [
        "| 1 | 0.9 | 0.6 | +0.3 |",
        "| 2 | 0.8 | 0.7 | +0.1 |",
        "| 3 | 0.7 | 0.5 | +0.2 |",
        "| 4 | 1 | 0.7 | +0.3 |",
        "| 5 | 0.6 | 0.5 | +0.1 |",
    ]
    # Mean difference .2, standard deviation .1: two standard deviations are detected by 5 pairs, not by 4.
    assert lines[9] == "| mean | 0.8 | 0.6 | +0.2 |"
    assert lines[11].startswith("95% interval of the mean difference: +0.1")
    assert lines[11].endswith("(bootstrap over pairs)")
    assert lines[12] == "5 seeds detect a difference of 0.1682 with probability 0.8"
    assert lines[13] == "detecting the observed difference needs 5 seeds, which these runs have"
    assert lines[14:] == [
        "seeds that only the runs have, omitted: 6",
        "seeds that only the baseline runs have, omitted: 7, 8",
    ]


def test_runs_of_several_configurations_are_compared_one_by_one_and_named(runs):
    ours = [*runs("slow", {1: 0.9, 2: 0.8}, lr=0.1), *runs("fast", {1: 0.5, 2: 0.6}, lr=0.2)]
    done = compare(*ours, "--baseline", *runs("theirs", {1: 0.5, 2: 0.5}, lr=0.3))
    assert done.returncode == 0, done.stderr
    slow, fast = done.stdout.split("\n\nruns: ")
    assert slow.startswith("runs: lr=0.1\nbaseline: lr=0.3\n\nval/success_rate of the runs") and "+0.35 |" in slow
    assert fast.startswith("lr=0.2\nbaseline: lr=0.3\n") and "| mean | 0.55 | 0.5 | +0.05 |" in fast


def test_runs_in_different_environments_are_compared_with_a_warning(runs):
    def played(name, **settings):
        paths = runs(name, {1: 0.9})
        data = {"init_args": {"env": {"class_path": "GymnasiumEnvs", "init_args": settings}}}
        (paths[0] / "config.yaml").write_text(json.dumps({"seed_everything": 1, "data": data}))
        return paths

    small, text = played("small", id="CartPole-v1", numbers=None), played("text", id="CartPole-v1", numbers={"a": 1})
    assert "environments" not in compare(*small, "--baseline", *text).stdout
    long = played("long", id="CartPole-v1", max_episode_steps=9)
    last = compare(*small, "--baseline", *long).stdout.splitlines()[-1]
    assert last.startswith('the environments differ (CartPole-v1; CartPole-v1 {"max_episode_steps": 9}), so')


def test_kept_results_name_the_metric_and_its_bounds(tmp_path):
    files = []
    for name, values in {"ours": [500, 450, 400], "theirs": [480, 460, 300]}.items():
        kept = [{"seed": seed, "curve": {"val/return": [0, value]}} for seed, value in enumerate(values)]
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"metric": "val/return", "bounds": [0, 500], "runs": kept}))
    done = compare(files[0], "--baseline", files[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("val/return of the runs and of the baseline")
    assert "no interval: it needs at least 5 pairs, and there are 3" in done.stdout
    assert "seeds, " in done.stdout and "more" in done.stdout


def test_an_unbounded_figure_has_a_bootstrap_interval_where_it_is_asked_for(runs):
    ours = runs("ours", dict(enumerate([10, 20, 30, 40, 200])), "val/return")
    theirs = runs("theirs", dict.fromkeys(range(5), 0), "val/return")
    words = (*ours, "--baseline", *theirs, "--metric", "val/return")
    (student,) = [line for line in compare(*words).stdout.splitlines() if line.startswith("95%")]
    both = [line for line in compare(*words, "--bootstrap").stdout.splitlines() if line.startswith("95%")]
    assert both[0] == student == "95% interval of the mean difference: -38.16 to +158.2 (paired t)"
    low, high = (float(word) for word in both[1].split(": ")[1].split(" (")[0].split(" to "))
    assert 10 < low < 30 and 90 < high < 200 and both[1].endswith("(bootstrap over pairs)")


def test_the_results_of_the_repository_can_be_compared():
    done = compare("assets/results/cartpole_ppo_text.json", "--baseline", "assets/results/cartpole_ppo_mlp.json")
    assert done.returncode == 0 and "val/return" in done.stdout, done.stderr


def test_every_mistake_is_one_sentence(runs, tmp_path):
    ours, theirs = runs("ours", {1: 0.9}), runs("theirs", {2: 0.8})
    two = [*runs("slow", {1: 0.9}, lr=0.1), *runs("fast", {2: 0.9}, lr=0.2)]
    cases = {
        "at least one seed must be in both": [*ours, "--baseline", *theirs, "--metric", "val/success_rate"],
        "val/exact_success', which": [*ours, "--baseline", *theirs, "--metric", "val/exact_success"],
        "baseline has runs of 2 configurations (lr=0.1; lr=0.2); name runs of one": [*theirs, "--baseline", *two],
        "no metric in common": [*ours, "--baseline", *runs("lengths", {1: 5}, "val/length", "")],
        "which does not exist": ["nowhere", "--baseline", *theirs],
        "whose seed 1 another run has": [*ours, *ours, "--baseline", *theirs, "--metric", "val/success_rate"],
        "no config.yaml": [tmp_path, "--baseline", *theirs],
        "results have different metrics": [
            "assets/results/frozen_lake_grpo.json", "--baseline", "assets/results/cartpole_ppo_mlp.json"
        ],
        "holds no runs with a metric": ["assets/results/benchmark_text.json", "--baseline", *theirs],
        "holds 'val/return'; name that metric": [
            "assets/results/cartpole_ppo_mlp.json", "--baseline", *theirs, "--metric", "val/length"
        ],
        "whose last val/success_rate is not a number; leave seed 1 out": [
            *runs("nan", {1: "nan"}), "--baseline", *ours, "--metric", "val/success_rate"
        ],
    }  # fmt: skip
    for name, text in {"empty": "", "list": "[1]", "null": "model: null", "cut": "model: {", "seedless": "{}"}.items():
        (damaged,) = runs(name, {1: 0.9})
        (damaged / "config.yaml").write_text(text)
        said = "has no seed" if name == "seedless" else "whose config.yaml is damaged; leave the run out"
        cases[f"{damaged}', wh"] = cases[said] = [damaged, "--baseline", *ours, "--metric", "val/success_rate"]
    for number, content in enumerate(({"metric": "val/x", "runs": [1]}, {"metric": 1, "runs": [{"seed": 1}]})):
        file = tmp_path / f"shape{number}.json"
        file.write_text(json.dumps(content))
        cases[f"shape{number}.json"] = [file, "--baseline", *ours]
    for sentence, words in cases.items():
        done = compare(*words)
        assert done.returncode == 2 and sentence in done.stderr, (sentence, done.stderr)
        assert done.stderr.startswith("lrl compare: ") and len(done.stderr.splitlines()) == 1
