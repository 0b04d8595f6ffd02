"""Training of small targets and of EAGLE heads."""
