"""Target networks and their weights."""
