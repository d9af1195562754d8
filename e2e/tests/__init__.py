"""Tests of the tools in this folder themselves: no cluster, no root, nothing is started."""
