"""Liger's kernels: when they are asked for, on which model, and without those of the loss. No GPU is needed."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import pytest
import torch
from tiny_runs import make_trainer

from lrl.algorithms.sft import SFTModule
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.sources import ExpertDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.loading import fuse_kernels
from lrl.lm.model import LanguageModel
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig

_MODULES = "liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"


@pytest.fixture
def liger(monkeypatch):
    """Replace the package and the GPU by stubs, and return the list of patched models."""
    patched = []
    package, top, patch = map(ModuleType, _MODULES)
    package.__spec__ = ModuleSpec(package.__name__, None)
    vars(patch)["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"llama": None}
    vars(top)["_apply_liger_kernel_to_instance"] = lambda model, **kernels: patched.append((model, kernels))
    for module in (package, top, patch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return patched


def fuse(model):
    """Fuse the kernels of a model that is said to be on a GPU."""
    with mock.patch.object(LanguageModel, "device", torch.device("cuda")):
        fuse_kernels(model)


def model_of(**settings):
    return LanguageModel(LanguageModelConfig(name="assets/tiny-lm", **settings))


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2)])
def test_the_model_and_its_reference_are_patched_without_the_loss(liger, lora):
    model = model_of(liger_kernels=True, lora=lora)
    model.configure()
    model.build_reference(warm_started=False)
    fuse(model)
    patched = [type(found).__name__ for found, _ in liger]
    assert patched == ["LlamaForCausalLM"] * (1 if lora else 2)
    for _, kernels in liger:
        assert kernels["rms_norm"] and kernels["rope"] and kernels["swiglu"]
        assert not kernels["cross_entropy"] and not kernels["fused_linear_cross_entropy"]


def test_nothing_is_patched_unless_it_is_asked_for(liger):
    model = model_of()
    model.configure()
    fuse(model)
    assert not liger


def test_an_architecture_without_kernels_is_named(liger):
    vars(sys.modules[_MODULES[-1]])["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"gemma": None}
    model = model_of(liger_kernels=True)
    model.configure()
    with pytest.raises(ValueError, match="has no kernels for the architecture 'llama'; it must be false"):
        fuse(model)


def test_without_a_gpu_or_the_package_one_sentence_says_so(monkeypatch):
    model = model_of(liger_kernels=True)
    model.configure()  # weights can be evaluated and merged anywhere
    with pytest.raises(ValueError, match="liger_kernels is true, but the weights are on 'cpu'; it must be false"):
        fuse_kernels(model)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package liger_kernel, which is not installed; run pip install"):
        fuse(model)


def test_training_asks_for_them(tmp_path):
    policy = TextPolicy(LanguageModelConfig(liger_kernels=True), PromptTemplate(), SamplingConfig(max_new_tokens=3))
    data = DemonstrationsDataModule(ExpertDemonstrations(ExpertQRows()), GymnasiumEnvs("FrozenLake-v1"))
    with pytest.raises(ValueError, match="liger_kernels is true, but the weights are on 'cpu'"):
        make_trainer(tmp_path, enable_checkpointing=False).fit(SFTModule(policy), datamodule=data)
