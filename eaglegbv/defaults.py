"""Defaults that the API and the command line share, without anything that takes long to import."""

DRAFT_WIDTH = 1024
"""Candidates a draft law keeps. With 256 the tiny pair commits 4% less a step at temperature 1."""
