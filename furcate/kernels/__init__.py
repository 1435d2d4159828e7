"""Tensors in, tensors out: the torch reference of each operation, which is also the CPU path."""
