"""Evaluations: what is sampled, what is computed of it, and what is kept."""
