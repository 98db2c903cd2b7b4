"""The sampling side of a run: prompts become scored samples on the policy's servers."""
