"""Runs PTX, what nvcc makes of CUDA kernels, on the host.

Threads are lanes of numpy arrays, and addresses of global memory are the host's. What is known are
the instructions that FlashInfer's attention kernels are made of; any other is an error.
"""
