"""The operator process: watches rollouts, reads their objects, carries out the plans of ``decide``, and writes the status."""
