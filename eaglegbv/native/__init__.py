"""Forwards on a CPU by a small library of our own, in C++."""
