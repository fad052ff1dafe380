"""Tokens from files make the batches that encoding makes."""

import copy
import errno

import numpy as np
import pytest
import torch

from lrl.codecs.numbers import NumberFormat
from lrl.data import demonstration_tokens as token_cache
from lrl.data.demonstration_tokens import EncodedTokens
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import collect
from lrl.data.sources import ExpertDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.evaluation.load import load_baseline
from lrl.evaluation.rephrased import Phrasing, RephrasedCodec
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig

PENDULUM = GymnasiumEnvs("Pendulum-v1", max_episode_steps=9)
LAKE = GymnasiumEnvs("FrozenLake-v1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Six random episodes of nine steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
        policy = load_baseline("random", PENDULUM).policy
        collect(policy, PENDULUM, "lrl/pendulum-v0", 6, 3, 2, name="random", commit="")
        yield "lrl/pendulum-v0"


@pytest.fixture(scope="module")
def model():
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(), SamplingConfig())
    policy.configure()
    return policy


def data_of(model, source, env=PENDULUM, token_cache=None, loss_on="completion", **prompt):
    model.prompt = PromptTemplate(**prompt)
    model.connect(env.codec)
    data = DemonstrationsDataModule(source, env, 5, token_cache=token_cache, loss_on=loss_on)
    data.connect(model)
    return data


def assert_equal_batches(one, other, epochs=2):
    assert one.num_batches() == other.num_batches()
    for epoch in range(epochs):
        for index in range(one.num_batches()):
            assert one.num_tokens(epoch, index) == other.num_tokens(epoch, index)
            for rank in (0, 1):
                mine, theirs = one.batch(epoch, index, rank, 2), other.batch(epoch, index, rank, 2)
                assert mine.inputs.keys() == theirs.inputs.keys()
                for name, tensor in mine.inputs.items():
                    assert torch.equal(tensor, theirs.inputs[name]) and tensor.dtype == theirs.inputs[name].dtype
                for name in ("response_mask", "advantages", "old_logprobs"):
                    assert torch.equal(getattr(mine, name), getattr(theirs, name))


@pytest.mark.parametrize("loss_on", ["completion", "all"])
@pytest.mark.parametrize("prompt", [{"response_format": "direct"}, {"history": 2}])
def test_batches_from_files_equal_encoded_ones(model, dataset, tmp_path, loss_on, prompt):
    source = MinariDemonstrations(dataset, split="all")
    cached, encoded = (data_of(model, source, PENDULUM, folder, loss_on, **prompt) for folder in (str(tmp_path), None))
    assert_equal_batches(cached, encoded)
    (files,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (files / "ids.bin").stat().st_size == 2 * np.load(files / "starts.npy")[-1]


def test_without_a_weight_the_loss_is_the_mean_over_target_tokens():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages = token_cache.demonstrations_batch({}, mask).advantages
    assert advantages.tolist() == [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]


def test_demonstrations_in_memory_have_files_too(model, tmp_path):
    rows = ExpertDemonstrations(ExpertQRows())
    assert_equal_batches(*(data_of(model, rows, LAKE, folder) for folder in (str(tmp_path), None)))


def test_a_second_run_encodes_a_few_demonstrations_only(model, dataset, tmp_path, monkeypatch):
    source = MinariDemonstrations(dataset, split="all")
    data_of(model, source, token_cache=str(tmp_path)).batch(0, 0)
    counted = []
    encode = EncodedTokens.encode
    monkeypatch.setattr(EncodedTokens, "encode", lambda self, some: counted.append(len(some)) or encode(self, some))
    data = data_of(model, source, token_cache=str(tmp_path))
    data.batch(0, 0)
    data.batch(1, 3)
    assert counted == [token_cache._NUM_PROBES]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": {"system": "Other words."}},
        {"prompt": {"response_format": "direct"}},
        {"env": GymnasiumEnvs("Pendulum-v1", numbers=NumberFormat(precision=1))},
        {"source": {"num_rows": 20}},
        {"source": {"seed": 1}},
        {"max_prompt_tokens": 1023},
    ],
    ids=["system", "response_format", "numbers", "num_rows", "seed", "max_prompt_tokens"],
)
def test_every_change_of_tokens_writes_new_files(model, dataset, tmp_path, monkeypatch, change):
    def make(prompt=None, env=PENDULUM, source=None, max_prompt_tokens=1024):
        monkeypatch.setattr(model.trunk, "max_prompt_tokens", max_prompt_tokens)
        demonstrations = MinariDemonstrations(dataset, **{"split": "all"} | (source or {}))
        data_of(model, demonstrations, env, str(tmp_path), **prompt or {}).batch(0, 0)
        return {path for path in tmp_path.iterdir() if path.is_dir()}

    assert len(make()) == len(make()) == 1
    assert len(make(**change)) == 2


@pytest.mark.parametrize(
    ("kind", "key", "pairs"),
    [("integers", "ranges", [[-1, 1], [-1, 1], [-8, 8]]), ("normalised", "statistics", [[0, 1], [0, 1], [0, 3]])],
)
def test_ranges_that_differ_by_little_make_new_files(model, dataset, tmp_path, kind, key, pairs):
    """A sample of texts may not show the difference: one value in a thousand has another text."""
    found = set()
    for last in (0.0, 1e-5):
        given = [*pairs[:-1], [pairs[-1][0], pairs[-1][1] + last]]
        env = GymnasiumEnvs("Pendulum-v1", max_episode_steps=9, numbers=NumberFormat(kind=kind, **{key: given}))
        for _ in range(2):
            data_of(model, MinariDemonstrations(dataset, split="all"), env, str(tmp_path)).batch(0, 0)
        found |= {path.name for path in tmp_path.iterdir() if path.is_dir()}
        assert len(found) == 1 + (last > 0)


def test_the_key_is_the_same_in_every_process(model, dataset, tmp_path):
    """The key must not depend on memory addresses or on cached results."""
    codec = RephrasedCodec(LAKE.codec, Phrasing(actions={"LEFT": "WEST"}, observations={"row": "line"}))
    bins = GymnasiumEnvs("Pendulum-v1", numbers=NumberFormat(kind="integers")).codec
    settings = [codec, bins, data_of, NumberFormat]
    before = token_cache._settings(settings)
    bins.observation_to_text(np.zeros(3))
    assert token_cache._settings(settings) == before == token_cache._settings(copy.deepcopy(settings))
    assert " at 0x" not in before and all(text in before for text in ("WEST", "line", "data_of", "NumberFormat"))


def test_files_that_were_not_finished_are_not_used(model, dataset, tmp_path, monkeypatch):
    source = MinariDemonstrations(dataset, split="all")
    with monkeypatch.context() as patch:
        patch.setattr(token_cache.np, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            data_of(model, source, token_cache=str(tmp_path)).batch(0, 0)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert_equal_batches(data_of(model, source, token_cache=str(tmp_path)), data_of(model, source), epochs=1)


def test_a_disk_that_is_full_raises_one_sentence_and_leaves_no_files(model, dataset, tmp_path, monkeypatch):
    def full_disk(path, array):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(token_cache.np, "save", full_disk)
    data = data_of(model, MinariDemonstrations(dataset), token_cache=str(tmp_path))
    sentence = f"data.token_cache is '{tmp_path}', which cannot be used: .*No space left on device: '{tmp_path}/.*npy'"
    with pytest.raises(ValueError, match=sentence):
        data.batch(0, 0)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_folder_that_cannot_be_made_raises_one_sentence(model, dataset, tmp_path):
    (tmp_path / "file").touch()
    data = data_of(model, MinariDemonstrations(dataset), token_cache=str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match="data.token_cache is '.*below', which cannot be used"):
        data.batch(0, 0)
