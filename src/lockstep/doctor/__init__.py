"""`lockstep doctor`: looks at the machine and at how workers would be started, and says what to change."""
