"""`lockstep plan`: predicts step time, memory, cost and goodput of a training program on other machines."""
