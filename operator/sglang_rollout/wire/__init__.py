"""What coordinator, agents, operator and trainers say to each other: models, paths and ports. No I/O, no decisions."""
