"""The command line. Commands import torch and transformers when they run, so help is quick."""
