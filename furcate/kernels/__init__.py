"""Tensors in, tensors out: each operation's torch reference, and its Triton twin beside it."""
