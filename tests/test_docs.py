"""Tests of the documentation: its Python blocks run, and its links and titles are right."""

import importlib.util
import re
import tomllib
import warnings
from pathlib import Path

import pytest
import yaml

import lrl

ROOT = Path("docs").resolve()
PAGES = sorted(page for page in ROOT.rglob("*.md") if "```python\n" in page.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """With few collections, passes and episodes: the pages say what the whole runs reached."""
    train, evaluate = lrl.train, lrl.evaluate

    def short(module, data, *, max_epochs, **settings):
        data.num_epochs, data.num_minibatches = 1, min(data.num_minibatches, 2)
        return train(module, data, max_epochs=min(max_epochs, 3), **settings)

    def few(*args, episodes=10, **settings):
        return evaluate(*args, episodes=min(episodes, 10), **settings)

    monkeypatch.setattr(lrl, "train", short)
    monkeypatch.setattr(lrl, "evaluate", few)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "documentation"}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    blocks = [re.sub(r"^from my_package\..*\n", "", block, flags=re.MULTILINE) for block in blocks]  # an earlier block
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Overriding environment")  # a page may be run twice in one process
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)


def test_titles_are_short():
    for page in (Path("README.md"), *Path("docs").rglob("*.md")):
        if "_build" not in page.parts:
            text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
            long = [title for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE) if len(title.split()) > 8]
            assert not long, f"{page}: {long}"


def test_the_readme_is_a_front_page():
    text = Path("README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert all("\\\n" not in block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL))


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load(Path("CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_links_between_files_lead_somewhere():
    for page in (Path("README.md"), Path("configs/README.md"), *Path("docs").rglob("*.md")):
        if "_build" in page.parts:
            continue
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page} links to {target}"


def test_links_to_the_code_name_one_definition():
    spec = importlib.util.spec_from_file_location("definitions", "docs/_extensions/definitions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    definitions = module.definitions()
    for page in Path("docs").rglob("*.md"):
        for name in re.findall(r"\{source\}`(?:[^`<]*<)?([^`<>]+)>?`", page.read_text(encoding="utf-8")):
            assert name.endswith(".py") or len(definitions.get(name, [])) == 1, f"{page}: {name}"
