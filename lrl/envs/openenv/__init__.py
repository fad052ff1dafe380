"""Environments by OpenEnv's protocol: those of others as text environments, and those of lrl on a server."""
