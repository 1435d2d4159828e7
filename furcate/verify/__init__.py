"""Sampling law, noise and rules: which path the target would have sampled."""
