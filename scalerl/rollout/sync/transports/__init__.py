"""The ways in which weights get from trainer ranks to rollout servers, one file each (`session.Transport`)."""
