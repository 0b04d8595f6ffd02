"""How others store EAGLE heads, and how to write for them."""
