"""Where a step's time goes: `python -m jpaged.profile` writes a table, a picture and a trace. Imported by nobody else."""
