"""What `lockstep demo` shows: two small trainings, one of which loses a worker on the way.

lockstep demo                                    all of it
lockstep run -n 3 -m lockstep.demo.digits        one of them, on three workers
python -m lockstep.demo.text                     the other one, on one
"""
