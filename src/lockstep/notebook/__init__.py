"""`lockstep.launch`: a function on several workers, from a notebook or a script."""
