"""Saves of a run, and where it resumes."""
