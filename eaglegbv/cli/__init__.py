"""The command line. Commands import torch and transformers only when they run, so help is quick."""
