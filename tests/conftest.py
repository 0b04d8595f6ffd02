"""Settings of every test."""

import torch
from hypothesis import settings

# How long an example takes depends on what else the machine does; that is no property to test.
settings.register_profile("any-machine", deadline=None, print_blob=True)
settings.load_profile("any-machine")

# The tensors of tests are tiny: threads that wait for each other cost ten times what they bring.
torch.set_num_threads(1)
