"""Fixtures for tests of several folders."""

import os

# Bit-identical resumes are promised on one thread: with several, the matrix library sums in another order from run to
# run. Set before torch is imported; child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["LRL_REPORT"] = "0"  # runs of tests write no report.html, which takes a second

import fcntl
import gc
import logging
import multiprocessing
import shutil

import pytest

gc.disable()  # until all tests are imported: a fifth of the time would be spent on finding no garbage

# The fork server keeps the list that it is started with, by whichever test comes first: ranks, runs that are killed,
# environments in processes. Nothing of lrl is in it, so children still import, and register, what they need.
LIBRARIES = ("gymnasium", "lightning.pytorch", "peft", "torchmetrics", "transformers.models.llama.modeling_llama")
multiprocessing.set_forkserver_preload([*LIBRARIES])

WORDS = "<pad> <unk> <|im_start|> <|im_end|> <think> </think> <answer> </answer> \n system user assistant left right up"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude the 700,000 objects of imported libraries from garbage collection, which starts after this."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Make a folder that all worker processes share: ``once(name, make)`` calls ``make(folder)`` in one of them."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder(name, make):
        with (shared / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if os.fstat(lock.fileno()).st_size == 0:  # no other worker finished it; tell() may be stale
                shutil.rmtree(shared / name, ignore_errors=True)
                (shared / name).mkdir()
                make(shared / name)
                lock.write("made")
        return shared / name

    return folder


@pytest.fixture(autouse=True)
def _logger_of_the_package():
    """Restore what a command run by a test changes: where the messages of ``lrl`` go."""
    logger = logging.getLogger("lrl")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture(scope="session")
def processes():
    """Children that start with the libraries imported."""
    return multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random Llama of 10,000 weights and a tokenizer of 48 words, chat template included."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from lrl.lm.chat_template import CHATML

    words = [*WORDS.split(" "), *(f"w{n}" for n in range(33))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\w+"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        padding_side="left",
        additional_special_tokens=words[2:3] + words[4:8],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)
