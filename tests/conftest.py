"""Settings of every test."""

from hypothesis import settings

# How long an example takes depends on what else the machine does; that is no property to test.
settings.register_profile("any-machine", deadline=None, print_blob=True)
settings.load_profile("any-machine")
