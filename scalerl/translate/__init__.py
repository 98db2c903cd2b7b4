"""`scalerl translate`: a launch script of verl, read without running it -> a scalerl command, a table of its keys."""
