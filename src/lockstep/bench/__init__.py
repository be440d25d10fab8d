"""`lockstep bench`: one file for each command, with `rounds` and `workers` shared by all."""
