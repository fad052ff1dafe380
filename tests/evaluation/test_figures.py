"""The notebook runs from its first cell to its last, and shows every picture that there is."""

import ast
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from results.summaries import kept_results, pictures

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "assets" / "figures.ipynb"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def shown_by(cell, names):
    """Run a cell as a notebook does: the value of its last expression is shown."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None


def drawn_for_the_first(count, save):
    """Return a method that lays out and rasterises some figures; the others, of which all parts are made, are empty."""
    saved = []

    def savefig(figure, path, **settings):
        saved.append(path)
        if len(saved) > count:
            figure, settings = Figure(figsize=(1, 1)), {"dpi": 10, "format": "png"}
        save(figure, path, **settings)

    return savefig


@pytest.mark.slow
def test_the_notebook_redraws_every_picture(monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "assets")
    monkeypatch.setattr(Figure, "savefig", drawn_for_the_first(4, Figure.savefig))
    names: dict = {}
    shown = [shown_by(cell, names) for cell in code_cells()]
    drawn = [one for one in shown if one is not None]
    assert all(one._repr_png_().startswith(b"\x89PNG") for one in drawn)
    kept = pictures(kept_results(ROOT / "assets" / "results"))
    wanted = [
        f"{name}{suffix}.png"
        for name, group in kept.items()
        for suffix in ["", *(f"_{clock}" for clock in (group[0].get("clocks") or [""])[1:])]
    ]
    assert sorted(one.path.name for one in drawn) == sorted(wanted)
    said = capsys.readouterr().out
    assert all(result["title"] in said for group in kept.values() for result in group)


def test_no_output_is_kept_in_the_notebook():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_cartpoles_network_is_drawn_against_episodes_first():
    """Performance profile as in figure 12 of the paper."""
    kept = kept_results(ROOT / "assets" / "results")
    assert kept["cartpole_ppo_mlp"]["clocks"] == ["episodes", "env_steps"]
