"""The sampling side: prompts become scored samples on the policy's servers."""
