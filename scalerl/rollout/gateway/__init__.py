"""A chat endpoint in front of the rollout servers, so that any program that talks to one can be trained."""
