"""The store of past successes: pure numpy, no ray."""
