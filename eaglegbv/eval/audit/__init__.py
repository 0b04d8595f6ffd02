"""Audits: whether a verifier, an engine or a server keeps the distribution of the target."""
