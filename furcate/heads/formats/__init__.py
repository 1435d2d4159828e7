"""Formats of heads that others write and read."""
