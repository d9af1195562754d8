"""The custom resource: its models, its conditions, and the generator of its definition."""
