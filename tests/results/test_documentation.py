from pathlib import Path

import pytest
from results.documentation import documentation_pages, fill_tables, narrow, seed_values_table
from results.headlines import HEADLINES
from results.sentences import SENTENCES, Sentence, figure_faults, fill_sentences
from results.summaries import kept_results

RUN = {"seed": 0, "minutes": 2.0, "curve": {"env_steps": [1], "val/return": [5.0]}}
RESULT = {
    "title": "PPO, of course",
    "command": "lrl fit --config configs/cartpole/ppo_mlp.yaml",
    "metric": "val/return",
    "runs": [RUN],
}


def page(kind):
    return f"a\n<!-- table: {kind} -->\nold\n<!-- end table -->\nb"


def test_only_the_text_between_the_marks_is_replaced():
    filled = fill_tables(Path("docs/a.md"), page("results r*"), {"r1": RESULT, "other": RESULT})
    lines = filled.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("a", "b", 14)
    assert lines[4].startswith("| PPO, of course | return 5.000 | 1 | – | 2.0 |")
    assert fill_tables(Path("docs/a.md"), filled, {"r1": RESULT}) == filled


def headline(name, results):
    return fill_tables(Path("README.md"), page(f"headlines {name}"), results).splitlines()[4]


def test_a_headline_has_rounded_figures_with_their_seeds_beside_the_random_and_the_best_policy():
    runs = [{**RUN, "curve": {"val/return": [value]}} for value in (460.3, 460.4)]
    results = {
        name: {**RESULT, "runs": runs[:count]}
        for name, count in {"cartpole_ppo_mlp": 2, "cartpole_ppo_text": 1}.items()
    }
    results["cartpole_ppo_mlp"]["counts"] = {"started": 4, "finished": 2, "failed": 1, "left_out": 1, "reasons": []}
    for name, value in {"baselines_random": 21.83, "experts": 500.0}.items():
        others = {"env_id": "Taxi-v4", "return_mean": 7.0}
        results[name] = {"environments": [others, {"env_id": "CartPole-v1", "return_mean": value}]}
    row = "[CartPole: return](docs/experiments/cartpole.md) | PPO | 22 | 500 | 460 (2 seeds) | 1.6M: 460 (1 seed) "
    assert headline("cartpole", results) == f"| {row}| network 4 / 1 / 1, model – |"


def test_a_headline_of_frozen_lake_has_exact_bounds_and_says_what_was_not_run():
    results = {"frozen_lake_grpo_new": {**RESULT, "runs": [{**RUN, "curve": {"val/return": [0.735]}}]}}
    assert headline("frozen_lake", results).endswith("| 0.01 | 0.74 | not run | 1.6M: 0.74 (1 seed) | – |")


def test_every_headline_has_its_results_and_its_notebook():
    kept = kept_results(Path("assets/results"))
    for name, one in HEADLINES.items():
        assert name and (Path("docs/experiments") / f"{one.notebook}.md").exists()
        assert headline(name, kept).count("|") == 8
    assert headline("babyai_zero_shot", kept).endswith("| 0.22 | 1.00 | not run | 135M: 0.94 (3 seeds) | 3 / 0 / 0 |")


def test_commands_are_folded_below_a_table_per_environment():
    other = RESULT | {"title": "GRPO", "command": "lrl fit --config configs/frozen_lake/grpo.yaml --a 'b'"}
    text = fill_tables(Path("docs/a.md"), page("results *"), {"a": RESULT, "b": other})
    tables, commands = text.partition("<details>")[0], text.split("<details>")[1:]
    assert "**CartPole**" in tables and "lrl fit" not in tables and "**FrozenLake**" in commands[0]
    assert "- GRPO: `lrl fit --config configs/frozen_lake/grpo.yaml --a 'b'`\n\n</details>" in commands[1]


def test_a_wide_table_is_split_into_parts_that_repeat_what_distinguishes_the_rows():
    heads, cells = (["env", "size", *(f"{name}{at}" for at in range(7))] for name in ("p", "x"))
    rows = [heads, ["---"] * 9, cells, ["env", "2", *cells[2:]]]
    parts = narrow("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\nafter | it").split("\n\n")
    assert parts[2:] == ["after | it"]
    assert [part.splitlines()[0] for part in parts[:2]] == [
        "| env | size | p0 | p1 | p2 | p3 |",
        "| env | size | p4 | p5 | p6 |",
    ]
    assert [part.splitlines()[3] for part in parts[:2]] == [
        "| env | 2 | x0 | x1 | x2 | x3 |",
        "| env | 2 | x4 | x5 | x6 |",
    ]
    small = "| a | b |\n|---|---|\n| `x \\| y` | 1 |"
    assert narrow(small) == small


def test_no_table_of_the_documentation_has_more_than_seven_columns():
    pages = [path for path in Path("docs").rglob("*.md") if "_build" not in path.parts]
    assert [str(path) for path in pages if narrow(path.read_text()) != path.read_text()] == []


def test_values_of_seeds_are_separate_from_a_search_table():
    table = "| task | n | ars | ppo |\n|---|---|---|---|\n| maze | 9 | 0.5 (0.1, -0.9) | 1/3 |\n| nim | 2 | 0.50 | 1 |"
    assert seed_values_table(table) == "| task | ars |\n|---|---|\n| maze | 0.5 (0.1, -0.9) |"
    assert not seed_values_table(table.replace(" (0.1, -0.9)", " (0.1 to 0.9)"))


def test_every_configuration_has_a_row():
    rows = fill_tables(Path("configs/README.md"), page("configs"), {"r": RESULT}).splitlines()[4:-2]
    assert len(rows) == len([path for path in Path("configs").glob("*/*.yaml") if path.parent.name != "overlays"])
    assert any("[`cartpole/ppo_mlp.yaml`](cartpole/ppo_mlp.yaml)" in row and "return 5.000" in row for row in rows)


@pytest.mark.parametrize(
    ("options", "is_shown"),
    [
        ("", True),
        (" --trainer.precision bf16-mixed", True),
        (" --model.init_args.init_from runs/start/seed{seed}", True),
        (" --model.init_args.init_from runs/start", False),
        (" --model.init_args.optimizer.lr 0.5", False),
        (" --trainer.precision bf16-mixed --model.init_args.optimizer.lr 0.5", False),
    ],
)
def test_a_result_with_other_settings_is_not_the_result_of_a_configuration(options, is_shown):
    result = {**RESULT, "command": RESULT["command"] + options}
    rows = fill_tables(Path("configs/README.md"), page("configs"), {"r": result}).splitlines()
    (row,) = [row for row in rows if "cartpole/ppo_mlp.yaml" in row]
    assert ("return 5.000" in row) == is_shown


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("nonsense", "must be one of results"),
        ("headlines missing", "must be one of frozen_lake, "),
        ("headlines cartpole", "a file of assets/results"),
        ("results x", "no file of assets/results matches"),
    ],
)
def test_a_table_that_cannot_be_made_raises_one_sentence(kind, sentence):
    with pytest.raises(ValueError, match=sentence):
        fill_tables(Path("README.md"), page(kind), {"r": RESULT})


def test_pages_with_tables_are_found(tmp_path):
    for name, text in {"README.md": page("configs"), "configs/README.md": "no table", "docs/b/c.md": page("x")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert documentation_pages(tmp_path) == [tmp_path / "README.md", tmp_path / "docs/b/c.md"]


def test_strategies_are_columns_of_the_table_of_ranks():
    row = {"algorithm": "trpo", "case": "", "difference": 2e-16, "tolerance": 1e-12, "largest_change": 0.1}
    rows = [{**row, "strategy": "ddp"}, *({**row, "algorithm": "sft", "strategy": name} for name in ("ddp", "fsdp2"))]
    filled = fill_tables(Path("docs/a.md"), page("ranks r"), {"r": {"two_ranks": rows}}).splitlines()
    assert filled[4:6] == [
        "| trpo |  | 2.0e-16 | not supported | 1e-12 | 0.1 |",
        "| sft |  | 2.0e-16 | 2.0e-16 | 1e-12 | 0.1 |",
    ]


def test_a_number_in_a_sentence_is_computed_and_every_other_one_is_named(monkeypatch):
    sentence = Sentence(text="After {} steps it has {}", figures=lambda results: [str(results["r"]["steps"]), "-0.5"])
    monkeypatch.setitem(SENTENCES, "README.md", (sentence,))
    text = "PPO of SmolLM2-135M: `a 1`. After 10\nsteps it has 7, and then 8%.\n| 9 |\n[x](b 6)"
    filled = fill_sentences("README.md", text, {"r": {"steps": 20}})
    assert filled == text.replace("10", "20").replace("has 7", "has -0.5")
    assert [fault.split(",")[0] for fault in figure_faults("README.md", filled)] == ["README.md has 8%"]
    with pytest.raises(ValueError, match="README.md has the sentence 'After {} steps it has {}' 0 times"):
        fill_sentences("README.md", "other", {})


def test_a_figure_with_an_interval_must_be_in_a_table_of_its_page():
    table = "<!-- table: results r -->\n| a | return 1.000 (0.500, 1.500) |\n<!-- end table -->\n"
    known, unknown = "It has 1.000 (0.500, 1.500; 2 seeds).", "It has 0.934 (0.875 to\n0.990; 5 seeds) in 8 runs."
    assert figure_faults("docs/a.md", table + known) == figure_faults("docs/a.md", "It has 0.123 and 0.12.") == []
    assert len(figure_faults("docs/a.md", f"{table}It has 0.123, 1.500, 0.12 and 0.1234.")) == 1
    assert "docs/a.md has 0.934 (0.875 to 0.990), which neither" in figure_faults("docs/a.md", table + unknown)[0]
