"""The audit of a running server: does it draw its tokens from the distribution that it reports?

A server that reports ``top_logprobs`` carries its own null hypothesis: given the text so far, the
next token has the law of its report. Whatever function of the token was chosen before it is drawn,
the sum of its differences from its expectation is a martingale, so long answers test without a
second server; and many short answers to few prompts test by what follows the same text.

Nothing here imports torch, as an audit needs no model, but `faults`, which no audit loads.
"""
