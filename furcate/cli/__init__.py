"""Commands: parse and call, decide nothing."""
