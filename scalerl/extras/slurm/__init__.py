"""`scalerl launch`: submits a run as a job of a scheduler, and watches or ends the job by the run's directory."""
