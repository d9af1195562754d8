"""A package of SGLang's name that holds nothing but a server to start."""
