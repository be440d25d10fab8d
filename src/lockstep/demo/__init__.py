"""`lockstep demo`: two small trainings, in one of which a worker is killed.

lockstep demo                                    all of it
lockstep run -n 3 -m lockstep.demo.digits        one of them, on three workers
python -m lockstep.demo.text                     the other one, on one
"""
