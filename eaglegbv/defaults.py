"""Defaults shared by the API and the command line, in a module that is quick to import."""

DRAFT_WIDTH = 256
"""Number of candidates a draft law keeps.

With 1,024, the tiny pair commits 3% more per step at temperature 1, and a step takes 6% longer.
"""
