"""`scalerl report`: one HTML page that explains a run, from the files in its directory."""
