"""Tokens and text: tokenizer, chat template, streaming detokenisation."""
