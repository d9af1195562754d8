"""Build the project's images with docker or buildah into archives that are named by content. See ``python3 -m e2e.images --help``."""
