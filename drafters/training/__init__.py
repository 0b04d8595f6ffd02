"""Training of heads."""
