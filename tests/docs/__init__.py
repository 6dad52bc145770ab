"""Tests of the pages: commands, links, and what is generated."""
