"""Dialogues from files: one format, converters into it, a runner, exact and judged scores."""
