"""Ways to measure settings: each yields parts, and a part returns observations."""
