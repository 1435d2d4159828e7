"""Requests, scheduler, the round, and the loop around it."""
