"""Configurations that are known to work: `rllib example list` shows them."""
