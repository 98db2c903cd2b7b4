"""Proofs for the user's own configuration: that a run resumes exactly, that a step can be computed again."""
