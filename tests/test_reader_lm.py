"""The embedded model `reader-lm` finds objects in observations that it was not trained on."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lrl.lm.config import LanguageModelConfig
from lrl.lm.model import LanguageModel

pytestmark = pytest.mark.slow
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


def test_reader_lm_has_the_size_and_tokenizer_of_tiny_lm(reader: LanguageModel) -> None:
    assert sum(weight.numel() for weight in reader.parameters()) < 2e6
    assert all(path.stat().st_size < 5 * 2**20 for path in (ROOT / "assets" / "reader-lm").iterdir())
    ours, other = ((ROOT / "assets" / name / "tokenizer.json").read_bytes() for name in ("reader-lm", "tiny-lm"))
    assert ours == other


def test_exercises_agree_with_their_text(script: Any) -> None:
    rng, goals = random.Random(3), 0
    for _ in range(300):
        seen, answer = script.where(rng)
        text = "".join(piece for piece, _ in answer)
        told, lines = {}, seen.split("\n")
        for line in (line for line in lines if line.startswith("You see a ") and "wall" not in line):
            _, _, _, color, kind, *place = line.split(" ")
            told[f"{color} {kind}"] = " ".join(place)
        said = text.split(" ", 1)[1].split(", ")
        if lines[0].startswith("Goal: "):
            goals, thing = goals + 1, " ".join(lines[0].split(" ")[-2:])
            expected = f"{thing} {told[thing]}" if thing in told else f"no {thing}"
            carried = thing not in told and f"You carry a {thing}" in lines
            assert said.pop(0) == (f"carry {thing}" if carried else short(expected))
        for part in said:
            thing = " ".join(part.split(" ")[:2])
            assert part in (f"{thing} {told[thing]}", short(f"{thing} {told[thing]}"))
    assert goals > 150


def short(text: str) -> str:
    return text.replace(" steps", "").replace(" step", "").replace(" and", "")


def test_only_predictable_words_are_supervised(script: Any, reader: LanguageModel) -> None:
    ids, asked = script.lessons(reader.tokenizer.tokenizer, random.Random(5), 40)
    assert ids.shape == asked.shape and not asked[:, :10].any()
    for row, known in zip(ids.tolist(), asked, strict=True):
        spoken = reader.tokenizer.tokenizer.decode(
            [token for token, one in zip(row, known.tolist(), strict=True) if one]
        )
        assert spoken.count("<|im_end|>") == 1 and "You" not in spoken and "<|pad|>" not in spoken


def test_initial_heads_attend_to_previous_tokens(script: Any, reader: LanguageModel) -> None:
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


@pytest.mark.slow
def test_reader_lm_reads_rooms_that_do_not_occur_in_training(script: Any, reader: LanguageModel) -> None:
    assert script.accuracy(reader.model, reader.tokenizer.tokenizer, count=100) > 0.93
