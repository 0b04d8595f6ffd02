"""What proves that a rule is lossless, and how good it can be at most, on tiny problems.

References of all rules run through a :class:`~eaglegbv.verifiers.proof.chooser.Chooser`, one
request at a time, in ``float`` or :class:`fractions.Fraction`.
"""
