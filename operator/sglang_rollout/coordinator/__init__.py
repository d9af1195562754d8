"""The coordinator: makes N SGLang engines look like one big SGLang server, and commits weight versions for all."""
