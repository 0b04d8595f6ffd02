"""Choice of the requests of each step, of their plans, and of the KV slots they hold."""
