"""A package with SGLang's name, which contains only the stand-in's server."""
