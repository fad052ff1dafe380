"""Components are found by their short names, and imported when a configuration names them."""

import importlib
import sys
from pathlib import Path

import pytest

from lrl.registry import GROUP, components, short_name


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a module with an entry point in a temporary folder: ``installed(name, source)``."""

    def install(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}\n")
        components.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    components.cache_clear()


@pytest.mark.slow
def test_every_component_is_the_class_of_its_name():
    assert len(components()) > 60
    for name, path in components().items():
        module = path.rpartition(".")[0]
        assert getattr(importlib.import_module(module), name).__module__ == module


def test_a_component_of_an_installed_package_is_found_by_its_name(installed):
    installed("far_package", "@register\n@final\nclass FarReward:\n    pass\n\n\nclass Other:\n    pass\n")
    assert components()["FarReward"] == "far_package.FarReward" and "far_package" not in sys.modules
    assert short_name("far_package.FarReward") == "FarReward" and short_name("far_package.Other") == "far_package.Other"


def test_two_components_of_one_name_raise(installed):
    installed("far_package", "@register\nclass SFTModule:\n    pass\n")
    with pytest.raises(ValueError, match=r"lrl.algorithms.sft.SFTModule and far_package.SFTModule .* rename one"):
        components()


def test_a_class_that_is_not_a_component_keeps_its_import_path():
    assert short_name("lrl.training.transcripts.Transcripts") == short_name("lrl.Transcripts") == "Transcripts"
    for path in ("torch.optim.Adam", "my_package.SFTModule", "my_package.Transcripts", "int"):
        assert short_name(path) == path


PARSE = """
import sys
assert not any(name.startswith("lrl") for name in sys.modules)
from lrl.cli.main import LRLCLI
LRLCLI._run_subcommand = LRLCLI.before_instantiate_classes = LRLCLI.instantiate_classes = lambda *given: None
LRLCLI(["fit", "--config", "frozen_lake/sft.yaml"])
with open({path!r}, "w") as file:
    print(*(name for name in sys.modules if name.startswith("lrl.")), file=file)
"""


@pytest.mark.slow
def test_a_run_imports_only_what_its_configuration_names(processes, tmp_path):
    """In a new process, which starts with other libraries imported but no module of lrl."""
    child = processes.Process(target=exec, args=(PARSE.format(path=str(tmp_path / "imported")), {}))
    child.start()
    child.join()
    assert child.exitcode == 0
    imported = set((tmp_path / "imported").read_text().split())
    assert {"lrl.algorithms.sft", "lrl.training.transcripts"} <= imported
    assert not any(name.startswith(("lrl.search", "lrl.openenv")) for name in imported)
    algorithms = {f"lrl.algorithms.{path.stem}" for path in Path("lrl/algorithms").glob("[a-z]*.py")}
    assert imported & algorithms == {"lrl.algorithms.sft"}
