"""Tests of the tools in this folder. They need no cluster and no root."""
