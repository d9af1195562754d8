"""Messages between coordinator, agents, operator and trainers: models, reason codes, paths and ports. No I/O, no decisions."""
