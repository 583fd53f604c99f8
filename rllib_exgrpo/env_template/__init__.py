"""What `rllib env new` copies: a small environment and its test, both working."""
