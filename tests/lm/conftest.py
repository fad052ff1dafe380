"""Fixtures for several tests of models."""

import pytest
from tiny_runs import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model of four layers with tied embeddings; some modules have a fixture of this name of their own."""
    return save_tiny_model(tmp_path_factory.mktemp("tied") / "tied", tie_word_embeddings=True, num_hidden_layers=4)
