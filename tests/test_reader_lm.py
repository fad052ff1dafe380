"""The embedded language model that reads: it says what stands in texts that it has never seen."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lrl.policies.language_model import LanguageModel, LanguageModelConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("build_reader_lm")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def reader() -> LanguageModel:
    model = LanguageModel(LanguageModelConfig(name="assets/reader-lm"))
    model.configure()
    return model.eval()


def test_it_is_as_small_as_the_other_and_has_its_tokenizer(reader: LanguageModel) -> None:
    assert sum(weight.numel() for weight in reader.parameters()) < 2e6
    assert all(path.stat().st_size < 5 * 2**20 for path in (ROOT / "assets" / "reader-lm").iterdir())
    ours, other = ((ROOT / "assets" / name / "tokenizer.json").read_bytes() for name in ("reader-lm", "tiny-lm"))
    assert ours == other


def test_exercises_say_what_the_text_says(script: Any) -> None:
    rng = random.Random(3)
    for _ in range(200):
        seen, answer = script.where(rng)
        short = " step" not in answer
        told = {}
        for line in (line for line in seen.split("\n") if line.startswith("You see a ") and "wall" not in line):
            _, _, _, color, kind, *place = line.split(" ")
            place = " ".join(place)
            drop = (" steps", ""), (" step", ""), (" and", "")
            for old, new in drop if short else ():
                place = place.replace(old, new)
            told[f"{color} {kind}"] = place
        for part in answer.removeprefix("see ").split(", "):
            words = part.split(" ")
            if words[0] == "no":
                assert " ".join(words[1:]) not in told
            else:
                assert told[" ".join(words[:2])] == " ".join(words[2:])


def test_with_a_goal_its_thing_comes_first(script: Any) -> None:
    rng = random.Random(4)
    rooms = [script.where(rng) for _ in range(100)]
    goals = [(seen.split("\n")[0], answer) for seen, answer in rooms if seen.startswith("Goal:")]
    assert len(goals) > 30
    for goal, answer in goals:
        thing = " ".join(goal.split(" ")[-2:])
        first = answer.removeprefix("see ").split(", ")[0]
        assert first == f"no {thing}" or first.startswith(f"{thing} ")


def test_heads_look_back_before_anything_is_learned(script: Any, reader: LanguageModel) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(reader.model.config)
    model.set_attn_implementation("eager")
    script.look_back(model)
    attention = model(torch.randint(5, 1500, (4, 30)), output_attentions=True).attentions[0]
    for head, offset in enumerate((1, 2, 3)):
        looked = attention[:, head].diagonal(-offset, dim1=-2, dim2=-1)[..., 6:]
        assert looked.min() > 0.97
    assert attention[:, 3:].diagonal(-1, dim1=-2, dim2=-1)[..., 6:].max() < 0.3


def test_it_reads_rooms_that_it_has_never_seen(script: Any, reader: LanguageModel) -> None:
    assert reader.tokenizer is not None
    assert script.accuracy(reader.model, reader.tokenizer.tokenizer, count=100) > 0.3
