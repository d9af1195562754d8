"""What the chaos trainer and those who watch it agree on."""

PROMPT = [4, 5, 6]
TOKENS = 6
