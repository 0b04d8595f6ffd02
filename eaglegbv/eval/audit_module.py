"""The former place of :mod:`eaglegbv.eval.audit.module`, for verifiers written for 0.1."""

from eaglegbv.eval.audit.module import ReferenceVerifier, StatefulReferenceVerifier

__all__ = ["ReferenceVerifier", "StatefulReferenceVerifier"]
