"""Where trainer and rollout meet: weights go from parallel/ to rollout/."""
