"""`scalerl init`: a directory with all that a first run of one's own needs, to edit."""
