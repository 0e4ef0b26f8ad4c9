"""Measurements of what Raincheck does to answers, each one command: `raincheck-hf bench ...`."""
