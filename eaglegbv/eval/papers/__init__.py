"""The comparisons of papers, by command: what to measure, and which way figures should differ."""
