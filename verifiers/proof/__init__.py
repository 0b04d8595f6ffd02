"""The verifiers as mathematics: readable, exact, one request at a time.

Numbers are ``float`` or :class:`fractions.Fraction`; every random decision goes through a
:class:`~eaglegbv.verifiers.reference.chooser.Chooser`, so one piece of code gives a sample, the
decision on given uniforms, and the exact distribution of the output.
"""
