"""Search for the parameters of small policies by their returns, without gradients."""
