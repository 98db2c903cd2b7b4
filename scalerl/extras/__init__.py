"""What stands on the core and what nothing of the core imports: verl, Slurm, plans, proofs, SGLang on a CPU."""
