"""`scalerl launch`: a run becomes a job of a scheduler, and is watched and ended by the name of its directory."""
