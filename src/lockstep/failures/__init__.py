"""From an exit status or traceback of a worker to the card with the cause and what to do."""
