"""The part of the agent that starts and ends engines of several pods together. Engines of one pod never use this package."""
