"""Text generation: two engines behind one HTTP protocol (SGLang's), their supervisor, client and weight stream.

Imports nothing itself: `rollout.supervise` must start in a fraction of a second.
"""
