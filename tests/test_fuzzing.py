"""A sample of the mutated configurations and command lines; ``python tests/fuzzing.py`` runs thousands of them."""

import pytest
from fuzzing import outcome, stopping, write_files
from mutations import command_case, configuration_case, configurations

SEED = 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_in_a_configuration_or_command_line_is_one_sentence(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    configs = configurations()
    cases = [configuration_case(number, SEED, configs) for number in range(12)]
    cases += [command_case(number, SEED) for number in range(20)]
    with stopping():
        found = [(case, outcome(case, seconds=None)) for case in cases]
    wrong = [(case, done) for case, done in found if done["verdict"] not in ("accepted", "error", "unnamed")]
    assert not wrong, wrong[0]
    assert {case.kind for case, done in found if done["verdict"] == "error"} > {"class", "broken", "wrong value"}
