"""The formats in which heads are stored, to read and to write."""
