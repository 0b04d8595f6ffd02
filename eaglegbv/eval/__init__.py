"""Benchmarks: questions, interleaved runs, figures and reports."""
