"""Target models: they judge what a drafter proposes."""
