"""Making heads: text written by the target itself, and training on it."""
