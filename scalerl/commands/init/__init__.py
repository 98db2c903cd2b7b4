"""`scalerl init`: writes a directory with the files that a user's first own run needs, to edit."""
