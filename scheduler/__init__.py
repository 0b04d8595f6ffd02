"""Who decodes next, and with whom."""
