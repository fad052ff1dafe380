"""A policy samples through any generator: here one that decodes row by row without a cache, and one with a script."""

import numpy as np
import pytest
import torch
from tiny_runs import batch_of, save_tiny_model, text_policy

from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.lm.decoding import Responses
from lrl.lm.logprobs import sample_tokens, sampling_logprobs
from lrl.types import RandomKeys

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
OBSERVATIONS = [render_map(state, MAP) for state in (0, 1, 0, 4, 0, 1)]


class RowByRow:
    """Decodes each row alone, and every token from its whole row."""

    def __init__(self, language_model, stop_text=None):
        self.language_model, self.stop_text = language_model, stop_text

    @torch.no_grad()
    def generate(self, prompts, uniforms, sampling):
        stop = self.language_model.tokenizer.stop_ids(self.stop_text)
        rows = [self._row(list(prompt), bits, sampling, stop) for prompt, bits in zip(prompts, uniforms, strict=True)]
        width = max(len(ids) for ids, _ in rows)
        ids, logprobs = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, (tokens, scores) in enumerate(rows):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), True
            logprobs[row, : len(tokens)] = torch.stack(scores)
        return Responses(ids=ids, mask=mask, logprobs=logprobs)

    def _row(self, prompt, bits, sampling, stop):
        tokens, scores = [], []
        while len(tokens) < sampling.max_new_tokens and not (tokens and tokens[-1] in stop):
            logits = self.language_model.model(torch.tensor([prompt + tokens])).logits[:, -1]
            logprobs = sampling_logprobs(logits, sampling)
            tokens.append(int(sample_tokens(logprobs, bits[len(tokens), None])))
            scores.append(logprobs[0, tokens[-1]])
        return tokens, scores


class Scripted:
    """Always gives the same response, as a server that serves other weights would."""

    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def generate(self, prompts, uniforms, sampling):
        ids = self.ids.repeat(len(prompts), 1)
        return Responses(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), logprobs=torch.zeros(ids.shape))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    policy = text_policy(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"), max_new_tokens=6)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    return policy


def test_acting_is_the_same_with_another_generator(policy, monkeypatch):
    rows = len(OBSERVATIONS)
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(rows), turn=np.zeros(rows, dtype=np.int64))
    built_in = policy.act(OBSERVATIONS, [()] * rows, keys, policy.sampling)
    monkeypatch.setattr(policy, "generator", RowByRow(policy.language_model))
    other = policy.act(OBSERVATIONS, [()] * rows, keys, policy.sampling)
    assert other.actions == built_in.actions and len(set(other.actions)) > 1
    assert torch.equal(other.response_mask, built_in.response_mask)
    torch.testing.assert_close(other.logprobs, built_in.logprobs, atol=1e-5, rtol=0)
    ratio = (policy.evaluate(batch_of(other)).logprobs - other.logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


def test_an_episode_is_played_with_another_generator(policy, monkeypatch):
    tokenizer = policy.language_model.tokenizer
    monkeypatch.setattr(policy, "generator", Scripted([*tokenizer.encode_text("LEFT"), tokenizer.end_id]))
    envs = GymnasiumEnvs("FrozenLake-v1", kwargs={"is_slippery": False}, max_episode_steps=7)
    results = evaluate_policy(policy, envs, episodes=3, seed=5, num_envs=2)
    assert results.lengths.tolist() == [7] * 3 and not results.invalid_actions.any()
