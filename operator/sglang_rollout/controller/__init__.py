"""The operator: it watches rollouts, reads their objects, carries out what ``decide`` plans, and writes their status."""
