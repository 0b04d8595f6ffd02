"""The formats in which EAGLE heads are stored, to read and to write."""
