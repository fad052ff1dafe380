"""Language models as reinforcement-learning policies."""
