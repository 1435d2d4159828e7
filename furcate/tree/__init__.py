"""What a tree is: shape, order, words, budgets, drawings; no torch."""
