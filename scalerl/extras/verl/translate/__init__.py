"""`scalerl translate`: reads a launch script of verl without running it, and prints scalerl's command and a table."""
