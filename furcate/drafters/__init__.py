"""Who guesses: each drafter turns what is committed into a pool of candidate nodes."""
