"""Drafters: what proposes draft trees, and how it is trained."""
