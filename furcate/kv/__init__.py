"""The paged KV cache and who owns which page."""
