"""A CUDA device that is the host: its runtime, and FlashInfer compiled for it."""
